"""Plans combine a schedule and a ladder, know their model, and survive a round trip through files."""

import json
import logging
import os
import random
import sys
import types
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.plan.identity import ModelIdentity
from depthdecay.plan.ladder import Ladder
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import ConstantSchedule, FullSchedule


def gaussian(seed: int, n: int = 512) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(0, 0.02) for _ in range(n)]


def quantised(values: list[float], bits: int = 4, block: int = 32) -> list[float]:
    top = 2 ** (bits - 1) - 1
    result: list[float] = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = max(map(abs, part)) / top
        result += [round(value / scale) * scale for value in part]
    return result


def identity(**changes) -> ModelIdentity:
    model = ModelIdentity("LlamaForCausalLM", 12, 64, 4, 100, "tiny", {"a": gaussian(1), "b": gaussian(2)})
    return replace(model, **changes)


PLANS = [
    Plan.full(12),
    Plan.decay(12, 0.9),
    Plan.decay(12, "0.95", warmup_tokens=3, min_layers=6, horizon=20),
    Plan.decay(12, 0.9, drop_order=[3, 1, 2]),
    Plan.for_speedup(12, 1.3, over_tokens=40),
    Plan.constant(12, 7),
    Plan.unified(12, 5),
    Plan.early_exit(12, 5),
    Plan.skipdecode(12, 4, 30),
    Plan.shortgpt([0.5, 0.1, 0.2, 0.4] * 3, 9),
    replace(Plan.decay(12, 0.9).with_model(identity()), repairs="repairs.safetensors", notes={"from": "a test"}),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
def test_plans_agree_with_their_tables(plan):
    depths = plan.depths(50)
    assert depths == tuple(plan.depth(i) for i in range(50))
    assert plan.visited_depths(50) == tuple(sorted(set(depths), reverse=True))
    assert plan.layers_executed(50) == sum(depths)
    assert plan.layer_speedup(50) == 12 * 50 / sum(depths)
    for n in (0, 1, 17, 50):
        for layer in range(12):
            runs = [i for i in range(n) if layer in plan.layers(depths[i])]
            assert plan.last_token_of_layer(layer, n) == len(runs)
            assert runs == list(range(len(runs)))
    for depth in plan.visited_depths(50):
        assert sorted(plan.layers(depth) + plan.dropped(depth)) == list(range(12))
    assert plan.rule in plan.describe()
    assert "\n" not in plan.describe()
    hash(plan)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
@pytest.mark.parametrize("where", ["folder/inner", "own-name.json"])
def test_save_and_load(plan, where, tmp_path):
    file = plan.save(tmp_path / where)
    assert file == tmp_path / (where if where.endswith(".json") else f"{where}/plan.json")
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]
    assert Plan.load(str(tmp_path / where)) == plan
    assert Plan.load(file) == plan
    document = json.loads(file.read_text(encoding="utf-8"))
    assert (document["format"], document["version"]) == ("depthdecay-plan", 1)


def test_a_saved_plan_can_be_read_by_others(tmp_path):
    file = Plan.full(3).save(tmp_path)
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_save_leaves_the_old_plan_whole(tmp_path, monkeypatch):
    Plan.full(12).save(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DepthDecayError, match="No space left"):
        Plan.decay(12, 0.9).save(tmp_path)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    assert Plan.load(tmp_path) == Plan.full(12)


def test_what_cannot_be_written_is_refused(tmp_path):
    for notes in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(DepthDecayError, match="JSON"):
            replace(Plan.full(3), notes=notes).save(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DepthDecayError, match="cannot be written"):
        Plan.full(3).save(tmp_path / "file")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".json", "a\0b", "a\0b.json", "\ud800.json"])
def test_names_that_no_file_can_have(name, tmp_path):
    with pytest.raises(DepthDecayError, match="cannot be written") as caught:
        Plan.full(3).save(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_path_is_not_the_current_folder(path, tmp_path, monkeypatch):
    Plan.full(3).save(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DepthDecayError, match="path is empty"):
        Plan.load(path)


def changed(**changes: object) -> str:
    return json.dumps(PLANS[-1].to_dict() | changes)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": NaN}', "not JSON"),
        (b"[]", "depthdecay-plan"),
        (b"{}", "depthdecay-plan"),
        (changed(format="other"), "depthdecay-plan"),
        (changed(version=2), "version"),
        (changed(version="1"), "version"),
        (changed(version=None), "version"),
        (changed(rule=None), "rule"),
        (changed(notes=[]), "notes"),
        (changed(schedule=None), "schedule"),
        (changed(schedule={"kind": "power", "num_layers": 12, "alpha": "2"}), "alpha"),
        (changed(schedule={"kind": "full", "num_layers": 13}), "13 layers"),
        (changed(ladder={"num_layers": 12, "drop_order": [1, 1]}), "twice"),
        (changed(ladder=[]), "ladder"),
        (changed(model={}), "identity"),
        (changed(model=identity().to_dict() | {"hidden_size": "64"}), "hidden_size"),
        (changed(model=identity().to_dict() | {"fingerprint": {"a": [None]}}), "fingerprint"),
        (changed(model=identity().to_dict() | {"num_layers": 13}), "13 layers"),
        (changed(repairs="../elsewhere.safetensors"), "repairs"),
        (changed(repairs="/elsewhere.safetensors"), "repairs"),
        (changed(repairs=5), "repairs"),
        *[
            (json.dumps({k: v for k, v in PLANS[-1].to_dict().items() if k != name}), name)
            for name in ("rule", "schedule", "ladder", "model", "repairs", "notes")
        ],
    ],
)
def test_bad_files_are_refused_on_one_line(content, expected, tmp_path):
    file = tmp_path / "plan.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DepthDecayError) as caught:
        Plan.load(file)
    message = str(caught.value)
    assert expected in message
    assert str(file) in message
    assert "\n" not in message


def test_missing_places_are_refused_without_asking_the_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DepthDecayError, match=r"contains no plan\.json"):
        Plan.load(tmp_path / "empty")
    for path in (tmp_path / "absent", "absent", "some/absent.json", "", "a/b/c", "x" * 5000):
        with pytest.raises(DepthDecayError) as caught:
            Plan.load(path)
        assert "ModuleNotFoundError" not in str(caught.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one repository, owner/name, that can go offline; records its requests in order."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    class NotThere(HfHubHTTPError):
        def __init__(self):
            """Without the response that the real error carries."""

    file = Plan.decay(12, 0.9).save(tmp_path / "hub")
    hub = types.SimpleNamespace(reachable=True, asked=[], fetched={})

    def ask(url, timeout):
        hub.asked.append(url.removeprefix("https://huggingface.co/"))
        if not hub.reachable:
            logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
            raise ConnectionError("a long\nstory")
        if "owner/name" not in url:
            raise NotThere

    def download(repository, name):
        hub.asked.append((repository, name))
        hub.fetched[repository] = str(file)
        return str(file)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repository, name: hub.fetched.get(repository))
    monkeypatch.chdir(tmp_path)
    return hub


def test_load_from_a_repository(hub):
    assert Plan.load("owner/name") == Plan.decay(12, 0.9)
    assert hub.asked == ["owner/name/resolve/main/plan.json", ("owner/name", "plan.json")]
    with pytest.raises(DepthDecayError, match="neither a local file or folder nor a reachable") as caught:
        Plan.load("owner/other")
    assert "\n" not in str(caught.value)


def test_without_a_network_the_hub_is_asked_once_and_quietly(hub, capfd):
    hub.reachable = False
    with pytest.raises(DepthDecayError, match="ConnectionError"):
        Plan.load("owner/name")
    assert hub.asked == ["owner/name/resolve/main/plan.json"]
    assert capfd.readouterr() == ("", "")


def test_a_plan_fetched_before_needs_no_network(hub):
    Plan.load("owner/name")
    hub.reachable = False
    assert Plan.load("owner/name") == Plan.decay(12, 0.9)
    assert len(hub.asked) == 3


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(DepthDecayError, match="13 layers and the ladder for 12"):
        Plan(Ladder.middle_out(12), FullSchedule(13), "full")
    with pytest.raises(DepthDecayError, match="down to 3 layers"):
        Plan(Ladder.middle_out(12), ConstantSchedule(12, 3), "constant")
    with pytest.raises(DepthDecayError, match="down to 3 layers"):
        Plan.decay(12, 0.5, min_layers=3)
    with pytest.raises(DepthDecayError, match="13"):
        Plan.decay(12, 0.5, min_layers=13)
    with pytest.raises(DepthDecayError, match="core_head 2 and core_tail 2"):
        Plan.decay(4, 0.9)
    with pytest.raises(DepthDecayError, match="drop order"):
        Plan.decay(4, 0.9, drop_order=3)
    with pytest.raises(PlanMismatchError):
        Plan.full(11).with_model(identity())


def test_defaults_keep_the_core():
    plan = Plan.decay(12, 0.5)
    assert plan.schedule.final_depth == plan.ladder.min_layers == 4
    assert Plan.decay(12, 0.5, drop_order=range(12)).schedule.final_depth == 1


@settings(max_examples=40)
@given(st.integers(6, 48), st.floats(1, 2.5), st.integers(8, 300), st.integers(0, 8))
def test_for_speedup_reaches_what_was_asked_and_holds(num_layers, speedup, over_tokens, warmup):
    try:
        plan = Plan.for_speedup(num_layers, speedup, over_tokens=over_tokens, warmup_tokens=warmup)
    except DepthDecayError:
        fewest = num_layers * (warmup + 1) + 4 * (over_tokens - warmup - 1)
        assert over_tokens <= warmup or num_layers * over_tokens / fewest < speedup
        return
    assert plan.layer_speedup(over_tokens) >= speedup
    assert plan.depth(over_tokens * 10) == plan.depth(over_tokens - 1)


def test_for_speedup_of_one_is_full_depth():
    assert set(Plan.for_speedup(28, 1).depths(500)) == {28}


def test_shape_differences_are_sentences():
    other = ModelIdentity("GPT2LMHeadModel", 24, 32, 2, 50, "tiny")
    assert identity().shape_differences(identity(name="elsewhere", fingerprint=None)) == []
    assert identity().shape_differences(other) == [
        "12 layers against 24",
        "architecture LlamaForCausalLM against GPT2LMHeadModel",
        "hidden size 64 against 32",
        "4 attention heads against 2",
        "vocabulary of 100 against 50",
    ]


@pytest.mark.parametrize(("bits", "block"), [(8, 64), (4, 32), (4, 64), (4, 128)])
def test_quantised_weights_are_the_same_weights(bits, block):
    for seed in range(20):
        rounded = identity(fingerprint={"a": quantised(gaussian(seed), bits, block)})
        assert identity(fingerprint={"a": gaussian(seed)}).same_weights(rounded) is True


def test_other_weights_are_told_apart():
    one = identity()
    for seed in range(20):
        assert one.same_weights(identity(fingerprint={"a": gaussian(1), "b": gaussian(100 + seed)})) is False
    assert one.same_weights(identity(fingerprint={"a": [2 * x for x in gaussian(1)]})) is False
    assert one.same_weights(identity(fingerprint={"a": [0.0] * 512})) is False
    assert one.same_weights(identity(fingerprint={"a": gaussian(1), "c": gaussian(3)})) is True
    for fingerprint in (None, {}, {"c": gaussian(1)}, {"a": gaussian(1, 100)}):
        assert one.same_weights(identity(fingerprint=fingerprint)) is None


def test_check_model():
    plan = Plan.decay(12, 0.9)
    assert plan.check_model(identity()) is None
    with pytest.raises(PlanMismatchError, match=r"12 layers.*24 layers"):
        plan.check_model(identity(num_layers=24))
    bound = plan.with_model(identity())
    assert bound.check_model(identity(name=None, fingerprint=None)) is None
    with pytest.raises(PlanMismatchError, match=r"tiny.*other-name.*hidden size 64 against 32"):
        bound.check_model(identity(name="other-name", hidden_size=32))
    others = identity(name="twin", fingerprint={"a": gaussian(5)})
    warning = bound.check_model(others)
    assert warning is not None
    assert "tiny" in warning
    assert "twin" in warning
    repaired = replace(bound, repairs="repairs.safetensors")
    assert repaired.check_model(identity()) is None
    with pytest.raises(PlanMismatchError, match=r"tiny.*twin"):
        repaired.check_model(others)
    assert repaired.check_model(others, allow_other_weights=True) == warning
    assert "unknown" in (repaired.check_model(identity(fingerprint=None)) or "")
    with pytest.raises(PlanMismatchError):
        repaired.check_model(identity(hidden_size=32), allow_other_weights=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": ""},
        {"num_layers": 0},
        {"hidden_size": 64.0},
        {"vocab_size": True},
        {"name": 3},
        {"fingerprint": {"a": [float("nan")]}},
        {"fingerprint": {"a": "abc"}},
        {"fingerprint": {1: [0.5]}},
        {"fingerprint": [0.5]},
    ],
)
def test_bad_identities_are_refused(changes):
    with pytest.raises(DepthDecayError):
        identity(**changes)
