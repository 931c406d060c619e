"""What is rendered for platforms: valid by the platforms' own schemas, complete, and without a secret.

KubeRay's schema is its own definition of its resources, which is not kept here: the files of release v1.7.0
(Apache-2.0), unchanged: ray-operator/config/crd/bases/ray.io_rayjobs.yaml and ray.io_rayclusters.yaml of
github.com/ray-project/kuberay. Looked for in the folder that KUBERAY_CRDS names, then in shared/kuberay beside the
repository; skipped without.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from verl_ext.cluster.start import NODE_ENVIRONMENT
from verl_ext.compose import hardware_names
from verl_ext.errors import ConfigurationError
from verl_ext.platforms.__main__ import main
from verl_ext.platforms.builtin import missing_packages
from verl_ext.platforms.facts import IN_IMAGE, USER_IN_IMAGE, Facts, gather
from verl_ext.platforms.render import PLATFORMS, render
from verl_ext.settings import VARIABLES

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
CRDS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay"))
CRD_HASHES = {  # of v1.7.0, commit 59d663aeec13760646da3db9c1cf8cfe883e30b7
    "rayjobs": "01a5cf3b17c1769fda44af7e82debcd98722f0c27b9ab84d084681c6649121f5",
    "rayclusters": "c44704442eef0c6721ad40c1d66782c8bd3fdab9d3344306a5820910a679baa1",
}


def files_of(platform: str, **asked: Any) -> dict[str, str]:
    request = {"hardware": "h200x8", "nodes": 2, **PLATFORMS[platform].defaults, **asked}
    return render(platform, gather(**request))


def parsed(text: str) -> dict[str, Any]:
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def document(platform: str, **asked: Any) -> dict[str, Any]:
    [text] = files_of(platform, **asked).values()
    return parsed(text)


def cluster_of(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"].get("rayClusterSpec", found["spec"])


def pods(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    cluster = cluster_of(found)
    yield "head", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield "worker", group["template"]["spec"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_machine_is_rendered_for_every_platform(platform: str):
    made = [
        (hardware, *entry) for hardware in hardware_names() for entry in files_of(platform, hardware=hardware).items()
    ]
    for hardware, name, text in made:
        assert f"--hardware={hardware}" in text or name == "runtime-env.json"
        if name.endswith(".yaml"):
            assert parsed(text)
        elif name.endswith(".json"):
            assert json.loads(text)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_secret_can_be_in_it(platform: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    canary = "canary0123456789abcdef"
    for variable in VARIABLES:
        if variable.secret:
            monkeypatch.setenv(variable.name, canary)
    (tmp_path / ".env").write_text(f"E2B_API_KEY={canary}\n")
    monkeypatch.chdir(tmp_path)
    text = "".join(files_of(platform).values())
    assert canary not in text
    with pytest.raises(ConfigurationError, match="E2B_API_KEY is a setting") as caught:
        files_of(platform, overrides=[f"E2B_API_KEY={canary}"])
    assert canary not in str(caught.value)


# ---- KubeRay ----


@pytest.mark.parametrize("platform", ["kuberay-job", "kuberay-cluster"])
def test_every_setting_comes_from_the_kubernetes_secret(platform: str):
    own = {"VERL_EXT_DATA_ROOT", "VERL_EXT_ENV_FILE", "VERL_EXT_REQUIRE_E2B"}
    for _, pod in pods(document(platform, secret="mine")):
        variables = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        assert variables.pop("VERL_EXT_DATA_ROOT")["value"] == "/data"
        assert {name: variables.pop(name)["value"] for name in NODE_ENVIRONMENT} == NODE_ENVIRONMENT
        assert set(variables) == {variable.name for variable in VARIABLES} - own
        for name, entry in variables.items():
            assert entry == {
                "name": name, "valueFrom": {"secretKeyRef": {"name": "mine", "key": name, "optional": True}}
            }  # fmt: skip


@pytest.mark.parametrize("platform", ["kuberay-job", "kuberay-cluster"])
def test_the_head_has_no_gpu_and_the_workers_have_the_machines(platform: str):
    found = document(platform, hardware="h20x4", nodes=3)
    cluster = cluster_of(found)
    assert (
        cluster["headGroupSpec"]["rayStartParams"] | {"num-gpus": "0", "num-cpus": "0"}
        == (cluster["headGroupSpec"]["rayStartParams"])
    )
    [group] = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)
    gpus = {role: pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for role, pod in pods(found)}
    assert gpus == {"head": None, "worker": "4"}
    for _, pod in pods(found):
        [container] = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[mounts["/data"]]["persistentVolumeClaim"]["claimName"] == "verl-ags-data"
        assert container["resources"]["limits"] == container["resources"]["requests"]


def test_a_cluster_in_small_lends_what_verl_asks_for():
    [group] = cluster_of(document("kuberay-cluster", hardware="cpu"))["workerGroupSpecs"]
    assert group["rayStartParams"] == {"num-cpus": "8", "num-gpus": "1"}
    assert "nvidia.com/gpu" not in group["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_the_image_has_what_kuberay_and_the_templates_take_for_granted():
    assert f"WORKDIR {IN_IMAGE}" in DOCKERFILE
    assert f"--uid {USER_IN_IMAGE}" in DOCKERFILE
    # KubeRay's probes of Ray before 2.53 call wget (ray-operator/controllers/ray/utils/constant.go at v1.7.0).
    assert tuple(map(int, Facts().ray_version.split("."))) < (2, 53)
    assert re.search(r"apt-get install[^&]*\bwget\b", DOCKERFILE)


def test_kuberays_own_start_command_is_run_under_the_decision_on_cuda(tmp_path: Path):
    """The container's command, run by a real bash, with programs that say what they are given."""
    for _, pod in pods(document("kuberay-job", project=str(ROOT))):
        [container] = pod["containers"]
        command = [*container["command"], *container["args"]]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "KUBERAY_GEN_RAY_START_CMD": 'echo started "$LD_LIBRARY_PATH" with $(ulimit -n) && exit 7',
            "LD_LIBRARY_PATH": "/usr/local/cuda/compat:/opt/mine",
            "CUDA_COMPAT": "off",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 7, done.stderr
        assert done.stdout.startswith("started /opt/mine with ")


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with unknown fields refused, as `kubectl apply --validate=strict` does."""
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    for part in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(part, dict):
            strict(part)
    return schema


@pytest.fixture(scope="module")
def kuberay() -> dict[str, jsonschema.Draft4Validator]:
    """A validator of each kind, made of KubeRay's own files."""
    made = {}
    for plural, digest in CRD_HASHES.items():
        path = CRDS / f"ray.io_{plural}.yaml"
        if not path.is_file():
            pytest.skip(f"no {path}: KubeRay's schema is not here (the docstring says where it is to be had)")
        data = path.read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, f"{path} is not that of v1.7.0"
        definition = parsed(data.decode())
        [schema] = [entry["schema"] for entry in definition["spec"]["versions"] if entry["name"] == "v1"]
        specification = strict(schema["openAPIV3Schema"])
        specification["properties"]["metadata"] = {"type": "object"}
        made[definition["spec"]["names"]["kind"]] = jsonschema.Draft4Validator(specification)
    return made


@pytest.mark.parametrize("platform", ["kuberay-job", "kuberay-cluster"])
@pytest.mark.parametrize("hardware", ["h200x8", "cpu"])
def test_kuberay_takes_it(platform: str, hardware: str, kuberay: dict[str, jsonschema.Draft4Validator]):
    found = document(platform, hardware=hardware)
    validator = kuberay[found["kind"]]
    assert [error.message for error in validator.iter_errors(found)] == []
    pod = next(pod for _, pod in pods(found))
    pod["containers"][0]["envs"] = []
    assert [error.message for error in validator.iter_errors(found)] == [
        "Additional properties are not allowed ('envs' was unexpected)"
    ]


# ---- compose ----


@pytest.fixture(scope="module")
def compose_spec() -> Any:
    """A validator of compose files, by the schema of compose-spec.io that check-jsonschema brings."""
    builtin = pytest.importorskip("check_jsonschema.builtin_schemas", reason="not installed here: invoke setup")
    schema = builtin.get_builtin_schema("vendor.compose-spec")
    assert schema["$schema"] == "https://json-schema.org/draft-07/schema"  # without its #, so not found by name
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("hardware", ["h200x2", "cpu"])
def test_compose_takes_it(hardware: str, compose_spec: Any):
    found = document("compose", hardware=hardware)
    assert [error.message for error in compose_spec.iter_errors(found)] == []
    found["services"]["head"]["shmsize"] = "1gb"
    [error] = compose_spec.iter_errors(found)
    assert "'shmsize' does not match" in error.message


def test_our_own_compose_file_is_valid_too(compose_spec: Any):
    found = parsed((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    assert [error.message for error in compose_spec.iter_errors(found)] == []


def test_nodes_of_compose_share_no_gpu_and_the_sandbox_is_the_one_that_reaches_nothing():
    services = document("compose", hardware="h200x2", nodes=2)["services"]
    given = [
        services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("head", "worker-1")
    ]
    assert given == [["0", "1"], ["2", "3"]]
    extended = services["sandbox"]["extends"]
    assert "sandbox" in parsed(Path(extended["file"]).read_text())["services"]
    assert "deploy" not in services["trainer"]
    assert services["trainer"]["environment"]["RAY_ADDRESS"] == "http://head:8265"
    assert services["trainer"]["command"] == ["invoke", "launch", "--hardware=h200x2", "--nodes=2"]


# ---- TI-ONE ----


def test_the_built_in_image_gets_what_it_lacks_at_the_locks_versions():
    files = files_of("tione-builtin", overrides=["trainer.save_freq=10"])
    wanted = json.loads(files["runtime-env.json"])
    assert "e2b==2.50.0" in wanted["pip"]
    assert wanted["pip"] == missing_packages()
    names = {entry.partition("==")[0] for entry in wanted["pip"]}
    assert {"e2b-code-interpreter", "invoke", "ipython", "math-verify"} <= names
    assert names & {"torch", "vllm", "verl", "ray", "transformers", "numpy", "nvidia-nccl-cu12"} == set()
    assert wanted["working_dir"].startswith("/")
    assert set(wanted["env_vars"]) == {"VERL_EXT_DATA_ROOT", "VERL_EXT_ENV_FILE"}
    last = files["start-command.sh"].splitlines()[-1]
    assert shlex.split(last) == [
        "python", "-m", "verl_ext.launch", "--hardware=h200x8", "--nodes=2", "trainer.save_freq=10",
    ]  # fmt: skip
    assert "LD_LIBRARY_PATH=" not in "".join(files.values())


def test_what_a_package_of_an_image_brings_is_not_installed_again(tmp_path: Path):
    lock = tmp_path / "gpu.txt"
    lock.write_text(
        "ours==1 \\\n    --hash=sha256:00\n    # via -r common.in\n"
        "torch==2 \\\n    --hash=sha256:00\n    # via -r common.in\n"
        "deep==3\n    # via numerics\n"
        "numerics==4\n    # via\n    #   ours\n    #   torch\n"
        "only-ours==5\n    # via\n    #   -r common.in\n    #   ours\n"
    )
    assert missing_packages(("torch",), lock) == ["only-ours==5", "ours==1"]


# ---- Slurm ----


@pytest.mark.parametrize("hardware", ["h200x8", "cpu"])
def test_the_batch_script_is_clean_and_asks_for_the_machine(hardware: str, tmp_path: Path):
    [text] = files_of("slurm", hardware=hardware, nodes=4).values()
    program = Path(sys.executable).with_name("shellcheck")
    if not program.is_file():
        pytest.skip("shellcheck is not installed here: invoke setup")
    script = tmp_path / "train.sbatch"
    script.write_text(text)
    done = subprocess.run([program, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["nodes"] == "4"
    assert asked.get("gpus-per-node") == ("8" if hardware == "h200x8" else None)
    assert asked["ntasks-per-node"] == "1"


# ---- What may be asked ----


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"nodes": 0}, "at least one"),
        ({"hardware": "h200"}, "did you mean h200x"),
        ({"name": "My Job"}, "--name"),
        ({"data_root": "data"}, "--data-root"),
        ({"overrides": ["a=$(rm -rf ~)"]}, "recipe file"),
        ({"overrides": ["a"]}, "KEY=VALUE"),
    ],
)
def test_what_cannot_be_rendered_is_said(asked: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        files_of("kuberay-job", **asked)


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["kuberay-job", "--image=registry.example/verl-ags:1", "--nodes=4", "trainer.save_freq=10"]) == 0
    found = parsed(capsys.readouterr().out)
    assert [pod["containers"][0]["image"] for _, pod in pods(found)] == ["registry.example/verl-ags:1"] * 2
    assert found["spec"]["entrypoint"] == (
        "env PYTHONPATH=/opt/verl-ags python -m verl_ext.launch --hardware=h200x8 --nodes=4 trainer.save_freq=10"
    )
    assert main(["tione-image", f"--out={tmp_path}/new"]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["runtime-env.json", "start-command.sh"]
    assert main(["slurm", "--out=/proc/none"]) == 2
    assert main(["slurm", "--nodes=0"]) == 2
    assert "Traceback" not in capsys.readouterr().err
