/* Makes reads of one file fail, and counts those of others: a library to be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, ERROR, CUT };
enum { MOST = 16 };
static struct {
  char ending[1024]; /* of the path of the file */
  int kind;
  long first, reads; /* the first read that fails; how many there were */
} watched[MOST];
static int files;

void watch_none(void) { files = 0; }

void watch(const char *ending, int kind, long first) {
  if (files == MOST) return;
  snprintf(watched[files].ending, sizeof watched->ending, "%s", ending);
  watched[files].kind = kind;
  watched[files].first = first;
  watched[files++].reads = 0;
}

long reads_of(int file) { return watched[file].reads; }

/* Counts a read of a watched file. Returns whether it is to fail. */
static int fails(int fd) {
  char link[64], path[4096];
  if (!files) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  for (int i = 0; i < files; i++) {
    size_t length = strlen(watched[i].ending);
    if (n < (ssize_t)length || strcmp(path + n - length, watched[i].ending)) continue;
    watched[i].reads++;
    if (watched[i].kind == CUT && watched[i].reads == watched[i].first) {
      struct stat s;
      if (fstat(fd, &s) || truncate(path, s.st_size / 2)) return 1;
    }
    return watched[i].kind == ERROR && watched[i].reads >= watched[i].first;
  }
  return 0;
}

#define FAULTY(result, name, parameters, arguments)                              \
  result name parameters {                                                       \
    static result(*real) parameters;                                             \
    if (!real) real = (result(*) parameters)dlsym(RTLD_NEXT, #name);             \
    if (fails(fd)) {                                                             \
      errno = EIO;                                                               \
      return -1;                                                                 \
    }                                                                            \
    return real arguments;                                                       \
  }

FAULTY(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n))
FAULTY(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
FAULTY(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
FAULTY(ssize_t, preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at))
FAULTY(ssize_t, preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at))
FAULTY(ssize_t, preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int how), (fd, to, n, at, how))
