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
  long first, reads; /* the first read that fails; how many have delivered bytes */
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

/* Returns which watched file this is, or -1. Cuts it if it is time. */
static int watched_file(int fd) {
  char link[64], path[4096];
  if (!files) return -1;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return -1;
  path[n] = 0;
  for (int i = 0; i < files; i++) {
    size_t length = strlen(watched[i].ending);
    if (n < (ssize_t)length || strcmp(path + n - length, watched[i].ending)) continue;
    if (watched[i].kind == CUT && watched[i].reads + 1 == watched[i].first) {
      struct stat s;
      watched[i].first = 0;
      if (fstat(fd, &s) || truncate(path, s.st_size / 2)) return -1;
    }
    return i;
  }
  return -1;
}

static int fails(int file) {
  return file >= 0 && watched[file].kind == ERROR && watched[file].reads + 1 >= watched[file].first;
}

#define FAULTY(result, name, parameters, arguments)                              \
  result name parameters {                                                       \
    static result(*real) parameters;                                             \
    if (!real) real = (result(*) parameters)dlsym(RTLD_NEXT, #name);             \
    int file = watched_file(fd);                                                 \
    if (fails(file)) {                                                           \
      errno = EIO;                                                               \
      return -1;                                                                 \
    }                                                                            \
    result delivered = real arguments;                                           \
    if (file >= 0 && delivered > 0) watched[file].reads++;                       \
    return delivered;                                                            \
  }

FAULTY(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n))
FAULTY(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
FAULTY(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
FAULTY(ssize_t, preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at))
FAULTY(ssize_t, preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at))
FAULTY(ssize_t, preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int how), (fd, to, n, at, how))
