"""The explorer of tuned workloads: fewer graphs, sizes of one's own, both halves, and what it refuses in place."""

import attrs
import pytest
from explore.tuning_cases import PlainCosts, drawn_steps

from replay_sim.config import load_config
from replay_sim.explore.tuning import tune
from replay_sim.explore.tuning_score import score
from replay_sim.explore.workload_explorer import SIZES, WorkloadExplorer
from replay_sim.explore.workload_steps import TunedWorkload

CONFIG, COSTS = load_config("default"), PlainCosts()


def tuned(seed: int) -> TunedWorkload:
    seen, unseen = drawn_steps(CONFIG, seed, 120), drawn_steps(CONFIG, seed + 1, 120)
    return TunedWorkload(CONFIG, seen, unseen, COSTS, tune(CONFIG, seen, unseen, COSTS), f"drawn steps, seed {seed}")


@pytest.fixture(scope="module")
def workloads() -> dict[str, TunedWorkload]:
    return {"first": tuned(1), "second": tuned(7)}


@pytest.fixture(scope="module")
def shared(workloads) -> WorkloadExplorer:
    return WorkloadExplorer(workloads)


@pytest.fixture
def explorer(shared) -> WorkloadExplorer:
    shared.reset()
    return shared


def title(explorer: WorkloadExplorer) -> str:
    return explorer.figure.layout.title.text.replace("<br>", " ")


def test_it_starts_with_as_many_graphs_as_tuning_chose_on_unseen_steps(explorer, workloads) -> None:
    tuning = workloads["first"].tuning
    assert explorer.state["max_graphs"] == len(tuning.tuned.plan.replay_sizes)
    assert explorer.state["max_model_graphs"] == len(tuning.tuned.plan.model_sizes)
    assert explorer.state["judged_on"] == "unseen"
    assert explorer.score == score(explorer.plan, workloads["first"].unseen, COSTS)
    assert "a plain law" in explorer.figure.layout.annotations[-1].text


def test_fewer_graphs_are_the_best_of_so_many_and_cost_time(explorer, workloads) -> None:
    explorer.set(judged_on="tuned on")
    before, shown = explorer.score.expected_step_ms, title(explorer)
    explorer.controls["max_graphs"].value = 1
    assert len(explorer.plan.replay_sizes) == 1 and explorer.score.expected_step_ms > before
    assert title(explorer) != shown and "1 replay" in title(explorer)
    assert explorer.figure.data[1].x == explorer.plan.replay_sizes
    allowed = [
        point
        for row in workloads["first"].tuning.grid
        for point in row
        if len(point.replay_sizes) <= 1 and len(point.model_sizes) <= explorer.state["max_model_graphs"]
    ]
    assert explorer.plan.model_sizes == min(allowed, key=lambda point: point.expected_us).model_sizes


def test_sizes_of_ones_own_replace_the_best_ones(explorer) -> None:
    explorer.set(**{SIZES: "512, 128 256"})
    assert explorer.plan.replay_sizes == (128, 256, 512) and "sizes 128 256 512" in explorer.sentence
    explorer.set(**{SIZES: ""})
    assert explorer.plan.replay_sizes != (128, 256, 512)


def test_a_workload_chosen_by_hand_moves_the_counts(explorer, workloads) -> None:
    explorer.controls["workload"].value = "second"
    assert explorer.state["max_graphs"] == len(workloads["second"].tuning.tuned.plan.replay_sizes)
    assert explorer.score == score(explorer.plan, workloads["second"].unseen, COSTS)
    assert "seed 7" in explorer.figure.layout.annotations[-1].text.replace("<br>", " ")


def test_state_is_set_from_python_and_read_back(explorer) -> None:
    explorer.set(workload="second", max_graphs=2, judged_on="tuned on")
    state, sentence = explorer.state, explorer.sentence
    explorer.reset()
    assert explorer.state != state
    explorer.set(**state)
    assert explorer.state == state and explorer.sentence == sentence


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"workload": "third"}, "workload: 'third'"),
        ({"judged_on": "neither"}, "judged_on: 'neither'"),
        ({"max_graphs": -1}, "max_graphs: -1"),
        ({"max_model_graphs": True}, "max_model_graphs: True"),
        ({SIZES: "12 none"}, f"{SIZES}: 'none'"),
        ({SIZES: "0"}, f"{SIZES}: '0'"),
        ({SIZES: "9000"}, "9000"),
        ({"max_model_graphs": 1}, "max_model_graphs: 1 is not allowed; FULL graphs"),
        ({"colour": 1}, "colour is no control"),
    ],
)
def test_nonsense_is_refused_in_place(explorer, values: dict, named: str) -> None:
    plan = explorer.plan
    explorer.set(**values)
    assert named in explorer.message and explorer.plan == plan
    explorer.set(max_graphs=2)
    explorer.reset()
    assert explorer.message == ""


def test_without_a_workload_that_leaves_a_choice_there_is_nothing_to_explore(workloads) -> None:
    fixed = attrs.evolve(workloads["first"], tuning=attrs.evolve(workloads["first"].tuning, grid=()))
    with pytest.raises(ValueError, match="must leave a choice"):
        WorkloadExplorer({"fixed": fixed})
    assert list(WorkloadExplorer({"fixed": fixed, "second": workloads["second"]}).workloads) == ["second"]


def test_the_saved_cell_shows_the_figure_without_a_kernel(explorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert bundle["application/vnd.plotly.v1+json"]["data"] and "ms a step" in bundle["text/plain"]
