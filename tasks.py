"""The table of contents: what one can do here. Each body is one command; the work is in verl_ext and recipe."""

import os
import shlex
import signal
import sys
from pathlib import Path

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit, ParseError
from invoke.program import Program
from invoke.tasks import task

ROOT = Path(__file__).resolve().parent
# What every stack has and the bootstrap does not.
NEEDED = ("dotenv", "rich")


def parse_tasks(self: Program) -> None:
    """invoke's own, but a wrong word on the command line gives status 2, as with every other command, and not 1."""
    try:
        _parse_tasks(self)
    except ParseError as error:
        raise Exit(str(error), code=2) from None


_parse_tasks, Program.parse_tasks = Program.parse_tasks, parse_tasks


def run(context: Context, *command: str) -> None:
    """Run a command from the project's folder and wait; if it fails, its exit status becomes invoke's."""
    with context.cd(str(ROOT)):
        result = context.run(f"exec {shlex.join(filter(None, command))}", warn=True, in_stream=False)
    if result is None or result.exited:
        # Not `if result`: the result of a command that failed is false.
        status = 1 if result is None else result.exited
        if status < 0:
            # A process that a signal ended has said nothing itself, pytest after "all passed" among them.
            name = signal.Signals(-status).name
            raise Exit(f"{shlex.join(filter(None, command))} was ended by {name}", code=128 - status)
        raise Exit(code=status)


def become(module: str, *arguments: str) -> None:
    """Become one of the project's modules, in the user's own folder.

    Not a child of invoke: a SIGTERM that ends invoke alone would leave a child training. CUDA's libraries are
    chosen here too, since `docker exec` and Kubernetes' `command:` go around the image's entrypoint.
    """
    from verl_ext import cuda_compat  # standard library only, and not needed by `invoke --list`

    if not all(any(Path(folder, name).is_dir() for folder in sys.path) for name in NEEDED):
        raise Exit("no stack is installed in this environment: invoke setup --stack cpu (or gpu)", code=2)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # noqa: TID251 - passed on
    command = [sys.executable, "-m", module, *filter(None, arguments)]
    os.execve(sys.executable, command, cuda_compat.apply({**os.environ, "PYTHONPATH": path}))  # noqa: S606, TID251


def given(flags: dict[str, str]) -> list[str]:
    """The flags that have a value, each with it, so that a value may begin with a dash."""
    return [f"{flag}={value}" for flag, value in flags.items() if value]


def overrides(by_flag: list[str] | None) -> list[str]:
    """What the user gave with `--set`, and behind `--`, word by word; invoke itself would join that."""
    words = sys.argv
    behind = words[words.index("--") + 1 :] if "--" in words else []
    given = [*(by_flag or []), *behind]
    if not all(given):
        raise Exit("an override is empty: write --set KEY=VALUE, for example --set trainer.save_freq=10", code=2)
    return given


def words_after(name: str) -> list[str]:
    """What stands behind a task's name before its first flag: invoke takes a fixed number of them."""
    words = sys.argv[sys.argv.index(name) + 1 :] if name in sys.argv else []
    return words[: next((at for at, word in enumerate(words) if word.startswith("-")), len(words))]


@task(help={"stack": "cpu or gpu"})
def setup(context, stack="cpu"):
    """Install a stack from its hash-pinned lock."""
    run(context, sys.executable, "-m", "verl_ext.stack", stack)


@task(
    help={
        "hardware": "a file of recipe/retool/config/hardware; one with GPUs needs the gpu stack",
        "control": "break one thing: no-learning, wrong-values, no-weight-sync",
        "set_": "KEY=VALUE of verl's configuration, repeatable",
    },
    iterable=["set_"],
)
def smoke(context, hardware="cpu", control="", set_=None):
    """Train a tiny model for real, on a CPU or a GPU."""
    if (ROOT / "recipe" / "retool" / "config" / "hardware" / f"{hardware}.yaml").is_file():  # else it is told below
        setup(context, "cpu" if hardware == "cpu" else "gpu")
    flags = {"--hardware": hardware, "--control": control}
    become("recipe.smoke.run", *given(flags), *overrides(set_))


@task(
    help={
        "train": "default DAPO-Math-17k: file, folder, hub id kept locally, YAML description; repeatable",
        "val": "default AIME 2024; AIME 2025, MATH-500: likewise; repeatable",
        "out": "folder for the files; default: data/retool of the data root",
        "max_rows": "keep the first N questions of each side",
        "language": "en, zh or all",
        "model": "count prompts with this model's tokenizer",
        "max_prompt_tokens": "leave out longer training prompts; needs --model",
        "data_root": "where hub ids are looked up; default: VERL_EXT_DATA_ROOT",
    },
    iterable=["train", "val"],
)
def prepare_data(
    context, train=None, val=None, out="", max_rows="", language="", model="", max_prompt_tokens="", data_root=""
):
    """Make training and validation files from raw data."""
    sources = [f"--{side}={path}" for side, paths in (("train", train), ("val", val)) for path in paths or []]
    flags = {
        "--out": out, "--max-rows": max_rows, "--language": language, "--model": model,
        "--max-prompt-tokens": max_prompt_tokens, "--data-root": data_root,
    }  # fmt: skip
    become("recipe.retool.prepare_data", *sources, *given(flags))


@task(
    positional=["file"],
    help={
        "file": "a run's name or folder, rollouts or answers (parquet, jsonl)",
        "show": "differing answers to show",
        "json": "write everything to this file as well",
    },
)
def grade(context, file, show=20, json=""):
    """Compare our grader with verl's and math-verify."""
    become("recipe.retool.grade", file, "--show", str(show), *(["--json", json] if json else []))


@task(
    help={
        "hardware": "a file of recipe/retool/config/hardware; default: by GPUs",
        "model": "a Hugging Face folder or hub id; default: the recipe's",
        "train": "parquet made by prepare-data; default: the data root's",
        "val": "parquet made by prepare-data; default: the data root's",
        "recipe": "a file of recipe/retool/config",
        "run_id": "name of the run",
        "resume": "go on with a run that died: its name or folder; alone, the last one begun",
        "data_root": "in place of VERL_EXT_DATA_ROOT",
        "env_file": "in place of ./.env",
        "sandbox": "auto, e2b or local",
        "stop_on": "alarms that end the run: NAME,NAME (verl_ext/alarms/README.md)",
        "json": "one JSON object a step on standard output",
        "dry_run": "show layers, plan, bare command and problems only",
        "set_": "KEY=VALUE of verl's configuration, repeatable; or all behind --",
    },
    iterable=["set_"],
    optional=["resume"],
)
def train(
    context, hardware="", model="", train="", val="", recipe="retool", run_id="", resume="", data_root="", env_file="",
    sandbox="", stop_on="", json=False, dry_run=False, set_=None,
):  # fmt: skip
    """Train on this machine, or where RAY_ADDRESS is."""
    flags = {
        "--recipe": recipe, "--hardware": hardware, "--model": model, "--train": train, "--val": val,
        "--run-id": run_id, "--resume": "latest" if resume is True else resume, "--data-root": data_root,
        "--env-file": env_file, "--sandbox": sandbox, "--stop-on": stop_on,
    }  # fmt: skip
    switches = ["--json" if json else "", "--dry-run" if dry_run else ""]
    become("verl_ext.launch", *given(flags), *switches, *overrides(set_))


@task(
    help={
        "address": "http://HEAD:8265 or HEAD:6379; default: RAY_ADDRESS, else the dashboard here",
        "nodes": "wait for so many with GPUs, or for these (a,b,c); all that are there are taken",
        "wait_s": "how long nodes are waited for; default: 600",
        "project": "where the project is on the nodes; default: where it is here",
        "upload": "send the project along, to nodes that have only the packages",
        "no_wait": "return when the job is submitted",
        "status": "ID: say where a job is",
        "logs": "ID: follow a job; its exit status",
        "stop": "ID: stop a job, end what is left of its sandboxes",
        "resume": "go on with a run that died: its name",
        "hardware": "a file of recipe/retool/config/hardware; default: by the nodes' GPUs",
        "model": "as for train, on the nodes; likewise all below",
        "train": "parquet", "val": "parquet", "recipe": "its name", "run_id": "name of the run, and of the job",
        "data_root": "folder that all nodes share", "env_file": "file that all nodes share; default: each node's own",
        "sandbox": "auto, e2b or local", "stop_on": "alarms that end the run: NAME,NAME",
        "set_": "KEY=VALUE of verl's configuration, repeatable; or all behind --",
    },
    iterable=["set_"],
)  # fmt: skip
def launch(
    context, hardware="", model="", train="", val="", recipe="", run_id="", resume="", data_root="", env_file="",
    sandbox="", stop_on="", address="", nodes="", wait_s="", project="", upload=False, no_wait=False, status="",
    logs="", stop="", set_=None,
):  # fmt: skip
    """Train on a Ray cluster."""
    flags = {
        "--address": address, "--nodes": nodes, "--wait-s": wait_s, "--project": project, "--status": status,
        "--logs": logs, "--stop": stop, "--resume": resume, "--recipe": recipe, "--hardware": hardware,
        "--model": model, "--train": train, "--val": val, "--run-id": run_id, "--data-root": data_root,
        "--env-file": env_file, "--sandbox": sandbox, "--stop-on": stop_on}  # fmt: skip
    switches = ["--upload" if upload else "", "--no-wait" if no_wait else ""]
    become("verl_ext.cluster.launch", *switches, *given(flags), *overrides(set_))


_NODE = {
    "node_address": "of this machine, if it has several",
    "env_file": "this node's settings and secrets, in place of ./.env",
    "gpus": "that Ray gives away; default: all that are here",
    "cpus": "likewise",
}


@task(
    help={
        "port": "of the cluster; default: 6379",
        "dashboard_host": "address that the dashboard listens on; whoever reaches it can run anything",
        "dashboard_port": "default: 8265",
        **_NODE,
    }
)
def cluster_head(
    context, port="", dashboard_host="", dashboard_port="", node_address="", env_file="", gpus="", cpus=""
):  # fmt: skip
    """Start a Ray cluster on this machine."""
    flags = {"--port": port, "--dashboard-host": dashboard_host, "--dashboard-port": dashboard_port,
             "--node-address": node_address, "--env-file": env_file, "--gpus": gpus, "--cpus": cpus}  # fmt: skip
    become("verl_ext.cluster.start", "head", *given(flags))


@task(positional=["address"], help={"address": "HOST:PORT that cluster-head said", **_NODE})
def cluster_join(context, address, node_address="", env_file="", gpus="", cpus=""):
    """Join this machine to a Ray cluster."""
    flags = {"--node-address": node_address, "--env-file": env_file, "--gpus": gpus, "--cpus": cpus}
    become("verl_ext.cluster.start", "join", *given(flags), address)


@task(help={"address": "HOST:PORT; default: of the node that runs here"})
def cluster_status(context, address=""):
    """Show a cluster's nodes and what is in use."""
    become("verl_ext.cluster.start", "status", *given({"--address": address}))


@task
def cluster_stop(context):
    """End the Ray node that was started here."""
    become("verl_ext.cluster.start", "stop")


@task(
    help={
        "model": "hub id; with it, or with data, nothing else is fetched",
        "data": "hub id of a data set",
        "source": "huggingface or modelscope",
        "revision": "branch, tag or commit",
        "data_root": "in place of VERL_EXT_DATA_ROOT",
        "env_file": "in place of ./.env",
    }
)
def download(context, model="", data="", source="", revision="", data_root="", env_file=""):
    """Fetch the recipe's model and data from a hub."""
    flags = {
        "--model": model, "--data": data, "--source": source, "--revision": revision,
        "--data-root": data_root, "--env-file": env_file,
    }  # fmt: skip
    become("verl_ext.download", *given(flags))


@task(
    positional=["run_"],
    help={
        "run_": "a run's name or folder, or a checkpoint's folder",
        "step": "of the checkpoint; default: the newest that is kept",
        "out": "default: RUN/export/global_step_STEP",
        "verify": "load it again, compare logits",
        "json": "for programs",
    },
)
def export(context, run_, step="", out="", verify=False, json=False):
    """Merge a run's checkpoint to Hugging Face format."""
    flags = given({"--step": step, "--out": out})
    become("verl_ext.export", run_, *flags, "--verify" if verify else "", "--json" if json else "")


@task(
    positional=["subject"],
    help={
        "subject": "a run's name or folder, a checkpoint's or model's folder, or a hub id",
        "step": "of the run's checkpoint; default: the newest that is kept",
        "base": "the model that the run began from, if it lies elsewhere now",
        "data": "aime-2024, aime-2025, math-500, or as prepare-data takes it; repeatable",
        "settings": "of no_tools,tools,trained; default: all that make sense",
        "n": "samples a problem; default: the recipe's",
        "max_problems": "keep the first N problems",
        "seed": "of all samples; default: 1",
        "run_id": "name of the evaluation; one that was interrupted goes on",
        "recipe": "a file of recipe/retool/config",
        "hardware": "a file of recipe/retool/config/hardware; default: by GPUs",
        "data_root": "in place of VERL_EXT_DATA_ROOT",
        "env_file": "in place of ./.env",
        "sandbox": "auto, e2b or local",
        "set_": "KEY=VALUE of verl's configuration, repeatable; or all behind --",
    },
    iterable=["data", "set_"],
)
def evaluate(
    context, subject, step="", base="", data=None, settings="", n="", max_problems="", seed="", run_id="",
    recipe="retool", hardware="", data_root="", env_file="", sandbox="", set_=None,
):  # fmt: skip
    """Measure a model, or a checkpoint beside its base."""
    flags = {
        "--step": step, "--base": base, "--settings": settings, "--n": n, "--max-problems": max_problems,
        "--seed": seed, "--run-id": run_id, "--recipe": recipe, "--hardware": hardware, "--data-root": data_root,
        "--env-file": env_file, "--sandbox": sandbox,
    }  # fmt: skip
    sets = [f"--data={one}" for one in data or []]
    become("recipe.retool.evaluate", subject, *sets, *given(flags), *overrides(set_))


@task(
    positional=["run_", "other"] if len(words_after("report")) > 1 else ["run_"],
    help={
        "run_": "the run's folder, or its name below the data root",
        "other": "a second run: the two are compared",
        "out": "the file; default: report.html in the run's folder",
        "steps": "trajectories of these steps only: FIRST-LAST",
        "max_mb": "of the trajectories' texts in the file",
        "data_root": "in place of VERL_EXT_DATA_ROOT",
    },
)
def report(context, run_, other=None, out="", steps="", max_mb="", data_root=""):
    """Write a run, or two compared, as one HTML file."""
    flags = {"--out": out, "--steps": steps, "--max-mb": max_mb, "--data-root": data_root}
    become("verl_ext.report", run_, other or "", *given(flags))


@task(help={"host": "address", "port": "0 for any", "isolation": "auto, required, none or a tier's name"})
def serve_sandbox(context, host="127.0.0.1", port=0, isolation="auto"):
    """Serve E2B-compatible sandboxes on this machine."""
    become("verl_ext.sandbox.server", "--host", host, "--port", str(port), "--isolation", isolation)


@task(
    help={
        "json": "print findings and advice as JSON",
        "max_probe": "sandboxes to have at once at most",
        "max_rate": "requests per second to try at most",
        "trajectories": "that a step rolls out",
    }
)
def check_sandbox(context, json=False, max_probe="", max_rate="", trajectories=""):
    """Measure the sandbox service; say how to use it."""
    options = {"--max-probe": max_probe, "--max-rate": max_rate, "--trajectories": trajectories}
    flags = [part for flag, value in options.items() if value for part in (flag, value)]
    become("verl_ext.check", "--json" if json else "", *flags)


@task(help={"run_": "id of the run: a folder's name in runs/", "json": "print the counts as JSON"})
def clean_sandboxes(context, run_, json=False):
    """End the sandboxes that a run left behind."""
    become("verl_ext.clean", "--run", run_, "--json" if json else "")


@task(
    help={
        "address": "of a Ray cluster: HOST:PORT or auto; default: RAY_ADDRESS, else this machine alone",
        "backend": "nccl or gloo; default: nccl if there are GPUs",
        "timeout_s": "seconds after which the ranks are ended",
        "json": "for programs",
    }
)
def check_network(context, address="", backend="", timeout_s="", json=False):
    """Time every pair of nodes, then an all-reduce."""
    flags = {"--address": address, "--backend": backend, "--timeout-s": timeout_s}
    become("verl_ext.network", *given(flags), "--json" if json else "")


@task(
    positional=["platform"],
    help={
        "platform": "kuberay-job, kuberay-cluster, tione-image, tione-builtin, slurm or compose",
        "hardware": "a file of recipe/retool/config/hardware: the GPUs of a node",
        "nodes": "with GPUs",
        "name": "of the job",
        "image": "with its registry",
        "project": "the project's folder on the nodes",
        "working_dir": "where TI-ONE's built-in image finds the project",
        "data_root": "on storage that all nodes share",
        "env_file": "the .env on the nodes",
        "secret": "name of the Kubernetes secret made of .env",
        "claim": "name of the Kubernetes volume claim",
        "out": "folder to write to",
        "set_": "KEY=VALUE of verl's configuration, repeatable; or all behind --",
    },
    iterable=["set_"],
)
def render(
    context, platform, hardware="", nodes="", name="", image="", project="", working_dir="", data_root="", env_file="",
    secret="", claim="", out="", set_=None,
):  # fmt: skip
    """Print what a platform wants of a run."""
    flags = {
        "--hardware": hardware, "--nodes": nodes, "--name": name, "--image": image, "--project": project,
        "--working-dir": working_dir, "--data-root": data_root, "--env-file": env_file, "--secret": secret,
        "--claim": claim, "--out": out,
    }  # fmt: skip
    become("verl_ext.platforms", platform, *given(flags), *overrides(set_))


@task(help={"deep": "import torch, flash-attn, vllm and verl too", "json": "for programs"})
def doctor(context, deep=False, json=False):
    """Say what a run would meet here, with cures."""
    become("verl_ext.doctor", "--deep" if deep else "", "--json" if json else "")


@task(help={"json": "for programs", "sbom": "as CycloneDX 1.5"})
def manifest(context, json=False, sbom=False):
    """Show packages, licences, revision, locks."""
    become("verl_ext.image.manifest", "--json" if json else "", "--sbom" if sbom else "")


@task
def settings(context):
    """Check the settings and show them, secrets hidden."""
    become("verl_ext.settings")


@task
def check(context):
    """Lint, types, layers."""
    setup(context)
    run(context, sys.executable, "-m", "ruff", "check", ".")
    run(context, sys.executable, "-m", "ruff", "format", "--check", ".")
    run(context, sys.executable, "-m", "pyright", "--pythonpath", sys.executable)
    run(context, str(Path(sys.executable).with_name("lint-imports")))


@task(help={"only": "a folder of tests/, for example unit", "k": "pytest's -k"})
def test(context, only="", k=""):
    """All checks, and all tests that need no GPU."""
    check(context)
    # The quick ones first. `image` and `cluster` need more than Python, so they are run by name.
    for folder in [only] if only or k else ["unit", "contract", "e2e"]:
        # The others share servers, ports and cores.
        cores = ["--numprocesses=logical", "--dist=worksteal"] if folder == "unit" else []
        pytest = [sys.executable, "-m", "pytest", "--durations=15", *cores, f"tests/{folder}"]
        run(context, *pytest, *(["-k", k] if k else []))


@task
def lock(context):
    """Resolve the locks again, as of the date in them."""
    become("verl_ext.lock")


namespace = Collection(
    setup,
    smoke,
    download,
    prepare_data,
    grade,
    train,
    launch,
    cluster_head,
    cluster_join,
    cluster_status,
    cluster_stop,
    evaluate,
    export,
    report,
    check_sandbox,
    check_network,
    render,
    clean_sandboxes,
    serve_sandbox,
    doctor,
    manifest,
    settings,
    check,
    test,
    lock,
)
