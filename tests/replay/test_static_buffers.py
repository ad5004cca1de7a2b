"""Static buffers: the seven inputs at fixed addresses, and what is refused before anything is written."""

import pytest
import torch

from replay_sim.replay.row_tensors import input_specs, output_specs
from replay_sim.replay.static_buffers import StaticBuffers

HIDDEN, STREAMS, LARGEST = 4, 2, 6
SHAPES = {
    "hidden_states": (HIDDEN,),
    "positions": (),
    "input_ids": (),
    "pre_mix": (STREAMS,),
    "post_mix": (STREAMS, 1),
    "res_mix": (STREAMS, STREAMS),
    "residual": (STREAMS, HIDDEN),
}
ACTIVATIONS = ("hidden_states", "residual")


def dtypes(activation: torch.dtype, ids: torch.dtype) -> dict[str, torch.dtype]:
    integers = {"positions": torch.int64, "input_ids": ids}
    return {name: integers.get(name, activation if name in ACTIVATIONS else torch.float32) for name in SHAPES}


@pytest.fixture
def device(backend) -> torch.device:
    return backend.device


def make(device: torch.device, activation=torch.bfloat16, ids=torch.int32) -> StaticBuffers:
    return StaticBuffers(input_specs(HIDDEN, STREAMS, activation, ids), LARGEST, device)


def make_values(device: torch.device, rows: int = 9, activation=torch.bfloat16, ids=torch.int32) -> dict:
    of = dtypes(activation, ids)
    return {name: torch.ones((rows, *shape), dtype=of[name], device=device) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16])
def test_one_zeroed_buffer_stands_for_each_of_the_seven_inputs(device, activation, ids) -> None:
    """B1."""
    buffers = make(device, activation, ids)
    made = {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in buffers.tensors.items()}
    expected = dtypes(activation, ids)
    assert made == {name: ((LARGEST, *shape), expected[name], device.type) for name, shape in SHAPES.items()}
    assert not any(bool(tensor.any()) for tensor in buffers.tensors.values())


@pytest.mark.parametrize(("hidden", "streams", "bytes_a_row"), [(5120, 4, 51_308), (HIDDEN, STREAMS, 68)])
def test_the_bytes_of_the_buffers_are_those_of_their_rows(hidden: int, streams: int, bytes_a_row: int) -> None:
    """B1, P7: 51,308 bytes a row at hidden size 5120, four streams, bfloat16."""
    buffers = StaticBuffers(input_specs(hidden, streams, torch.bfloat16), 3, torch.device("cpu"))
    assert buffers.nbytes == 3 * bytes_a_row
    assert buffers.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in buffers.tensors.values())


def test_output_buffers_hold_streams_mix_and_late_aux_states() -> None:
    """L4."""
    specs = output_specs(HIDDEN, STREAMS, torch.bfloat16, num_late_aux=2)
    assert [(spec.row_shape, spec.dtype) for spec in specs] == [
        ((STREAMS, HIDDEN), torch.bfloat16),
        ((STREAMS,), torch.float32),
        ((HIDDEN,), torch.bfloat16),
        ((HIDDEN,), torch.bfloat16),
    ]


def test_the_graph_of_size_n_reads_the_first_n_rows_of_the_buffers_themselves(device) -> None:
    """B2: views of one memory, whatever the size."""
    buffers = make(device)
    for rows in (LARGEST, 1, 4):
        for name, view in buffers.view(rows).items():
            assert view.shape[0] == rows and view.data_ptr() == buffers.tensors[name].data_ptr()


def test_more_rows_than_the_plans_largest_size_are_refused(device) -> None:
    """L4, U4: the buffers never grow with a call, so that no order of calls makes them too small."""
    for ask in (make(device).view, make(device).check_rows):
        with pytest.raises(ValueError, match="7 rows .* of 6 rows"):
            ask(LARGEST + 1)


@pytest.mark.parametrize("rows", [0, 1, 50])
def test_inputs_of_any_number_of_rows_are_accepted(device, rows: int) -> None:
    """B3: the step's rows, of which the buffers take the kept ones."""
    make(device).check(make_values(device, rows))


@pytest.mark.parametrize("name", SHAPES)
def test_an_input_of_another_shape_is_named(device, name: str) -> None:
    """B3."""
    values = make_values(device)
    for wrong in (values[name].unsqueeze(-1), torch.ones((), dtype=values[name].dtype, device=device)):
        with pytest.raises(ValueError, match=rf"{name} has shape"):
            make(device).check(values | {name: wrong})


@pytest.mark.parametrize("name", SHAPES)
def test_an_input_of_another_dtype_is_named_with_both_dtypes(device, name: str) -> None:
    """B3."""
    values = make_values(device)
    with pytest.raises(ValueError, match=rf"{name} is torch.float64, its buffer is {values[name].dtype}"):
        make(device).check(values | {name: values[name].double()})


@pytest.mark.parametrize(
    ("given", "planned", "message"),
    [
        (torch.int64, torch.int32, "input_ids is torch.int64, its buffer is torch.int32"),
        (torch.int32, torch.int64, "input_ids is torch.int32, its buffer is torch.int64"),
    ],
)
def test_ids_of_the_other_integer_type_are_refused(device, given, planned, message: str) -> None:
    """U14, B3."""
    with pytest.raises(ValueError, match=message):
        make(device, ids=planned).check(make_values(device, ids=given))


@pytest.mark.parametrize("name", SHAPES)
def test_an_input_on_another_device_is_named(device, name: str) -> None:
    """B3."""
    values = make_values(device)
    with pytest.raises(ValueError, match=rf"{name} is on meta, its buffer on {device.type}"):
        make(device).check(values | {name: values[name].to("meta")})


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_input_is_named(device, name: str) -> None:
    """B3."""
    values = make_values(device)
    del values[name]
    with pytest.raises(ValueError, match=rf"missing \['{name}'\], unknown \[\]"):
        make(device).check(values)


def test_an_unknown_input_is_named(device) -> None:
    """B3."""
    with pytest.raises(ValueError, match=r"missing \[\], unknown \['logits'\]"):
        make(device).check(make_values(device) | {"logits": torch.ones(9, device=device)})


@pytest.mark.parametrize("name", SHAPES)
def test_an_input_with_rows_of_its_own_number_is_refused(device, name: str) -> None:
    """B3: one row index gathers all seven."""
    values = make_values(device)
    with pytest.raises(ValueError, match=r"number of rows: .*8.*9"):
        make(device).check(values | {name: values[name][:8]})


def test_an_absent_input_is_no_error(device) -> None:
    """L5: it stays absent."""
    make(device).check(make_values(device) | {"input_ids": None})


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"input_ids"}))
def test_an_absent_input_hides_no_fault_of_another(device, name: str) -> None:
    """B3, L5."""
    values = make_values(device) | {"input_ids": None}
    with pytest.raises(ValueError, match=f"{name} is torch.float64"):
        make(device).check(values | {name: values[name].double()})


@pytest.mark.parametrize("deferred", [lambda: None, (torch.ones(9, HIDDEN), torch.ones(9, HIDDEN))])
def test_a_deferred_hidden_state_is_refused(device, deferred) -> None:
    """L8: a promise or a pair that is yet to be added has no rows to gather."""
    with pytest.raises(ValueError, match="hidden_states is a deferred .* finalise it before the replay layers"):
        make(device).check(make_values(device) | {"hidden_states": deferred})


def test_an_unfinalised_hidden_state_is_refused(device) -> None:
    """L8: one value an expert is not yet one value a row."""
    partial = torch.ones(9, 3, HIDDEN, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"hidden_states has shape \(9, 3, 4\)"):
        make(device).check(make_values(device) | {"hidden_states": partial})


def test_a_refused_input_writes_nothing(device) -> None:
    """B3."""
    buffers = make(device)
    with pytest.raises(ValueError):
        buffers.check(make_values(device) | {"residual": torch.ones(9, HIDDEN, device=device)})
    assert not any(bool(tensor.any()) for tensor in buffers.tensors.values())


@pytest.mark.parametrize("name", SHAPES)
def test_a_buffer_that_moved_is_named(device, name: str) -> None:
    """B4, U6."""
    buffers = make(device)
    buffers.check_addresses()
    buffers.tensors[name] = buffers.tensors[name].clone()
    with pytest.raises(RuntimeError, match=f"static buffer {name} moved"):
        buffers.check_addresses()


def test_a_buffer_resized_in_place_is_named(device) -> None:
    """B4: the same tensor over other memory."""
    buffers = make(device)
    buffers.tensors["residual"].resize_(100 * LARGEST, STREAMS, HIDDEN)
    with pytest.raises(RuntimeError, match="static buffer residual moved"):
        buffers.check_addresses()


def test_writing_into_a_buffer_is_no_move(device) -> None:
    """B4."""
    buffers = make(device)
    for tensor in buffers.tensors.values():
        tensor.fill_(3)
    buffers.check_addresses()


def test_a_plan_without_replay_sizes_has_buffers_of_no_rows(device) -> None:
    """A10: no graph, no rows, and the contract of eager replay is checked all the same."""
    buffers = StaticBuffers(input_specs(HIDDEN, STREAMS, torch.bfloat16), 0, device)
    assert buffers.nbytes == 0
    buffers.check_addresses()
    buffers.check(make_values(device))
    with pytest.raises(ValueError, match="positions"):
        buffers.check(make_values(device) | {"positions": torch.ones(9, device=device)})


def test_an_input_of_the_contract_that_is_absent_is_named(device) -> None:
    """B3: only input ids may be absent."""
    buffers = make(device)
    for spec in buffers.specs:
        values = make_values(device) | {spec.name: None}
        if spec.optional:
            buffers.check(values)
            continue
        with pytest.raises(ValueError, match=f"{spec.name} is absent"):
            buffers.check(values)
