"""Hosts that a cluster manager starts: the script that each of them runs, and the manifests that start it."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ndtrain.run import exit_status
from tests.islands.runs import free_port
from tests.launch.test_launch import ENV, SCRIPTS
from tests.lib.helpers import arguments, reset_signals, rows, wait_for, write_corpus

SCRIPT = SCRIPTS / "pod.sh"
JOBSET, TRAINJOB = (SCRIPTS / "kubernetes" / f"{kind}.yaml" for kind in ("jobset", "trainjob"))
SKYPILOT = SCRIPTS / "skypilot.yaml"
GIVEN = {"NODES", "ENDPOINT", "RUN_ID", "NDTRAIN_TOKEN"}  # besides NODE, which Kubernetes sets


class Pods:
    """Two hosts of one rank each, which are processes of this machine."""

    def __init__(self, tmp_path: Path, *more: str):
        self.folder, corpus = tmp_path / "run", write_corpus(tmp_path / "corpus.txt")
        args = arguments(self.folder, corpus, "mesh.fsdp=2", *more)
        common = {"NODES": "2", "ENDPOINT": f"127.0.0.1:{free_port()}", "RUN_ID": "job", "NPROC": "1"}
        common |= {"NDTRAIN_TOKEN": "a secret of the test"} | ENV
        self.hosts = [
            subprocess.Popen(
                [str(SCRIPT), *args], cwd=tmp_path, env=os.environ | common | {"JOB_COMPLETION_INDEX": str(node)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=reset_signals,
            )
            for node in range(2)
        ]  # fmt: skip

    def ended(self) -> list[tuple[int, str]]:
        """The exit status and the output of each host."""
        texts = [host.communicate(timeout=240)[0] for host in self.hosts]
        return [(host.returncode, text) for host, text in zip(self.hosts, texts, strict=True)]


@pytest.fixture
def pods(tmp_path, request) -> Iterator[Pods]:
    made = Pods(tmp_path, *getattr(request, "param", ()))
    yield made
    for host in made.hosts:
        if host.poll() is None:
            host.kill()


def test_two_pods_train_one_run_to_its_end(pods):
    ended = pods.ended()
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(rows(pods.folder)) == 10 and exit_status.read(pods.folder).why == "finished"
    assert "secret" not in "".join(p.read_text(errors="replace") for p in pods.folder.rglob("*.out"))


@pytest.mark.full
@pytest.mark.parametrize("pods", [["train.steps=100000"]], indirect=True)
def test_sigterm_to_one_pod_saves_and_ends_all(pods):
    wait_for(lambda: len(rows(pods.folder)) > 3, 120)
    pods.hosts[1].send_signal(signal.SIGTERM)
    ended = pods.ended()
    assert [code for code, _ in ended] == [85, 85], ended
    last = rows(pods.folder)[-1]["step"]
    assert (pods.folder / "checkpoints" / f"step-{last:08d}").exists()


@pytest.mark.parametrize("missing", ["NODE", "NODES", "ENDPOINT", "RUN_ID", "NDTRAIN_TOKEN"])
def test_pod_names_what_it_lacks(missing, tmp_path):
    given = {"NODE": "0", "NODES": "1", "ENDPOINT": "127.0.0.1:1", "RUN_ID": "job", "NDTRAIN_TOKEN": "secret"}
    left = {name: text for name, text in os.environ.items() if name not in given}
    env = left | {name: text for name, text in given.items() if name != missing}
    done = subprocess.run([str(SCRIPT), "recipe=llama_debug"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and re.match(rf"error: {missing} is not set: .*\n$", done.stderr), done.stderr
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------- manifests


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pod of a Kubernetes Job's template."""
    return job["template"]["spec"]["template"]["spec"]


def check_job(job: dict[str, Any]) -> None:
    """A lost host counts as a failure of the job. Errors that a restart would repeat, and a stop file, end it."""
    spec, pod = job["template"]["spec"], pod_of(job)
    (container,) = pod["containers"]
    lost, by_code = spec["podFailurePolicy"]["rules"]
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 300
    assert lost == {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget"}]}
    codes = {exit_status.CODES[why] for why in ("failed", "config", "stopped")}
    assert by_code["action"] == "FailJob" and set(by_code["onExitCodes"]["values"]) == codes
    assert by_code["onExitCodes"]["containerName"] == container["name"]
    assert {m["mountPath"]: m["name"] for m in container["volumeMounts"]} == {"/runs": "runs", "/dev/shm": "shm"}
    assert {volume["name"] for volume in pod["volumes"]} == {"runs", "shm"}


def names(container: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in container.get("env", ())}


def test_jobset_gives_each_pod_what_the_script_needs():
    (jobset,) = documents(JOBSET)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, (container,) = job["template"]["spec"], pod_of(job)["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    check_job(job)
    assert container["command"] == ["launch/pod.sh"] and env.keys() == GIVEN | {"ATTEMPT"}
    assert int(env["NODES"]) == spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    name = jobset["metadata"]["name"]
    assert env["ENDPOINT"].partition(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert env["RUN_ID"] == name and f"run.dir=/runs/{name}" in container["args"]


def test_trainjob_gives_each_pod_what_the_script_needs():
    runtime, trainjob = documents(TRAINJOB)
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    trainer, (container,) = trainjob["spec"]["trainer"], pod_of(job)["containers"]
    check_job(job)
    shell, option, line, _ = trainer["command"]
    assert (shell, option) == ("bash", "-c") and line.endswith('exec launch/pod.sh "$@"')
    given = set(re.findall(r"(\w+)=\$PET_", line)) | names(container) | names(trainer)
    assert given == GIVEN | {"NODE", "ATTEMPT"}
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] and container["name"] == job["name"]


def test_skypilot_task_gives_each_host_what_the_script_needs():
    (task,) = documents(SKYPILOT)
    given = set(re.findall(r"(\w+)=\$", task["run"])) | task["secrets"].keys()
    assert given == GIVEN | {"NODE"} and "launch/pod.sh" in task["run"]
    recovers = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert recovers == [exit_status.CODES["hang"]]
