"""verl's own data loading over prepared files: which rows come, in which order, and what a resumed run sees.

verl 0.6.1's ReTool data set class ignores train_max_samples and the filter for long prompts; the recipe names no class,
so that verl's standard one is used, which honours them. These tests hold it to that.
"""

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from recipe.retool.deduplicate import Problem
from recipe.retool.prepared import build_rows, write_rows
from recipe.retool.prompt_tokens import TOOL_CONFIG, PromptCounter
from recipe.retool.questions import build_prompt, clean_question, question_key
from verl_ext.compose import CONFIG_DIR, compose, resolve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    import torch.utils.data
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PreTrainedTokenizerFast
    from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from verl_ext.trainer import create_resumable_sampler

ROWS, BATCH = 40, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory, byte_tokenizer) -> Path:
    """A folder with a tokenizer of single bytes and Qwen3's chat template."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer.save_pretrained(folder)
    return folder


QUESTIONS = [f"What is {number}? " + "Think. " * (number % 10) for number in range(ROWS)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    problems = [
        Problem(question_key(text), clean_question(text), str(number), f"id-{number:02}", "math_dapo", rows=1)
        for number, text in enumerate(QUESTIONS)
    ]
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    write_rows(build_rows(problems, "train"), path, {})
    return path


@pytest.fixture
def load(file, model, tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """The training set as verl makes it from the recipe's configuration, with changes."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made: list[asyncio.AbstractEventLoop] = []
    real = asyncio.new_event_loop

    def new_event_loop() -> asyncio.AbstractEventLoop:
        made.append(real())
        return made[-1]

    # verl's initialize_tools_from_config makes an event loop and never closes it: we do, it would warn.
    monkeypatch.setattr("verl.tools.utils.tool_registry.asyncio.new_event_loop", new_event_loop)
    ours = ("verl_ext.run_id=r", "verl_ext.run_dir=/r", f"verl_ext.config_dir={CONFIG_DIR}")
    config = resolve(compose("retool", "cpu", ours)).data
    assert config.get("custom_cls", {}).get("path") is None
    assert OmegaConf.select(config, "tool_config_path") in (None, str(TOOL_CONFIG))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))

    def make(**changes: Any) -> Any:
        sizes = {"filter_overlong_prompts": False, "filter_overlong_prompts_workers": None}
        changed = OmegaConf.merge(config, sizes, {"tool_config_path": str(TOOL_CONFIG)}, changes)
        samples = changed.get("train_max_samples", -1)
        return create_rl_dataset(str(file), changed, tokenizer, None, is_train=True, max_samples=samples)

    yield make
    for loop in made:
        loop.close()


def ids(dataset: Any) -> list[str]:
    return [row["index"] for row in dataset.dataframe["extra_info"]]


def test_as_many_rows_as_asked_the_same_for_the_same_seed(load):
    first, again, other = (ids(load(train_max_samples=10, seed=seed)) for seed in (1, 1, 2))
    assert len(set(first)) == 10
    assert first == again
    assert first != other
    assert ids(load(train_max_samples=10, shuffle=False)) == [f"id-{number:02}" for number in range(10)]


def test_long_prompts_are_left_out_as_prepare_data_counts_them(load, model):
    lengths = PromptCounter(model)([build_prompt(clean_question(text).text) for text in QUESTIONS])
    longest = sorted(lengths)[ROWS // 2]
    expected = {f"id-{number:02}" for number, length in enumerate(lengths) if length <= longest}
    assert 0 < len(expected) < ROWS
    assert set(ids(load(filter_overlong_prompts=True, max_prompt_length=longest))) == expected
    assert len(ids(load(max_prompt_length=longest))) == ROWS


class Rows(torch.utils.data.Dataset):
    """Numbers in place of rows: the order is the sampler's and the loader's, whatever a row holds."""

    def __init__(self, count: int = ROWS) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        return number


def loader(make_sampler: Any = create_resumable_sampler, *, seed: int = 1, workers: int = 0, rows: int = ROWS) -> Any:
    """As RayPPOTrainer._create_dataloader makes it."""
    config = OmegaConf.create({"sampler": None, "shuffle": True, "seed": seed})
    dataset = Rows(rows)
    sampler = make_sampler(config, dataset)
    return StatefulDataLoader(
        dataset=dataset, batch_size=BATCH, num_workers=workers, drop_last=True, collate_fn=list, sampler=sampler
    )


def epochs(batches: Any, count: int) -> list[list[int]]:
    """The batches of some passes over a loader, as RayPPOTrainer.fit makes them."""
    return [batch for _ in range(count) for batch in batches]


def test_the_order_is_the_seeds_and_each_epoch_has_its_own():
    first, second = epochs(loader(), 2)[:10], epochs(loader(), 2)[10:]
    assert first + second == epochs(loader(), 2)
    assert first != second
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second)) == list(range(ROWS))
    assert first != epochs(loader(seed=2), 1)
    assert first == epochs(loader(create_rl_sampler), 1)  # verl's own order


def interrupted(taken: int, make_sampler: Any = create_resumable_sampler, **changes: int) -> list[list[int]]:
    """The batches of a run that stops after `taken`, and of the one that goes on from its checkpoint."""
    batches = loader(make_sampler, **changes)
    first = list(islice((batch for _ in range(3) for batch in batches), taken))
    state = batches.state_dict()  # where verl saves: the loop still stands at this batch
    resumed = loader(make_sampler, **changes)
    resumed.load_state_dict(state)
    # verl's loop begins its count of epochs anew and ends by the number of steps.
    return first + epochs(resumed, 3)[: 3 * len(resumed) - taken]


@pytest.mark.parametrize(
    ("taken", "workers", "rows"),
    [(3, 0, ROWS), (10, 0, ROWS), (13, 0, ROWS), (20, 0, ROWS), (29, 0, ROWS), (9, 0, 38), (11, 0, 38), (13, 2, ROWS)],
)
def test_a_resumed_run_goes_on_with_the_very_next_batch(taken, workers, rows):
    assert interrupted(taken, workers=workers, rows=rows) == epochs(loader(workers=workers, rows=rows), 3)


def test_with_verls_sampler_a_run_that_resumes_in_its_second_epoch_repeats_the_first():
    first = epochs(loader(create_rl_sampler), 1)
    assert interrupted(13, create_rl_sampler)[13:20] == first[3:]
    assert interrupted(13, create_rl_sampler) != epochs(loader(create_rl_sampler), 3)


def test_without_shuffling_verls_sampler_is_taken():
    config = OmegaConf.create({"sampler": None, "shuffle": False, "seed": 1})
    assert list(create_resumable_sampler(config, Rows())) == list(range(ROWS))


def test_the_trainer_makes_its_loader_as_these_tests_do():
    source = inspect.getsource(RayPPOTrainer._create_dataloader)
    assert "sampler=train_sampler" in source
    assert "drop_last=True" in source
    assert "create_rl_sampler(config.data, train_dataset)" in inspect.getsource(TaskRunner.run)
