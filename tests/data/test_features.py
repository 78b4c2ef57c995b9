import pytest
import torch

from data.conversations import Encoded
from data.features import OnlineFeatures, States
from decode import Target


@pytest.fixture
def samples() -> list[Encoded]:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 11, 8, 3]
    return [
        Encoded(torch.randint(2, 320, (n,), generator=generator).tolist(), [False] * (n // 2) + [True] * (n - n // 2))
        for n in lengths
    ]


def test_states_are_those_of_one_pass_over_each_conversation_and_padding_is_zero(tiny_target: Target, samples):
    batch = OnlineFeatures(tiny_target, samples, 0).batch([2, 0])
    assert batch.token_ids.shape == batch.loss_mask.shape == (2, 8)
    assert batch.hidden.shape == (2, 8, tiny_target.hidden_size)
    for row, index in enumerate([2, 0]):
        length = len(samples[index].token_ids)
        with torch.no_grad():
            inner = tiny_target.model.model(input_ids=torch.tensor([samples[index].token_ids])).last_hidden_state[0]
        torch.testing.assert_close(batch.hidden[row, :length], inner, rtol=0, atol=1e-10)
        assert batch.hidden[row, length:].eq(0).all()
        assert batch.loss_mask[row, length:].eq(False).all()
        assert batch.token_ids[row, :length].tolist() == samples[index].token_ids


def test_features_are_the_outputs_of_the_layers_that_were_asked_for(tiny_target: Target, samples):
    batch = OnlineFeatures(tiny_target, samples, 2**20, (1, 2)).batch([2, 0])
    width = tiny_target.hidden_size
    assert batch.features is not None
    assert batch.features.shape == (2, 8, 2 * width)
    assert torch.equal(batch.hidden, OnlineFeatures(tiny_target, samples, 0).batch([2, 0]).hidden)
    for row, index in enumerate([2, 0]):
        length = len(samples[index].token_ids)
        with torch.no_grad():
            model = tiny_target.model.model
            out = model(input_ids=torch.tensor([samples[index].token_ids]), output_hidden_states=True)
            last = model.norm(batch.features[row, :length, width:])
        torch.testing.assert_close(batch.features[row, :length, :width], out.hidden_states[1][0], rtol=0, atol=1e-10)
        torch.testing.assert_close(last, out.last_hidden_state[0], rtol=0, atol=1e-10)
        assert batch.features[row, length:].eq(0).all()
    assert OnlineFeatures(tiny_target, samples, 0).batch([0]).features is None


def test_batches_are_bitwise_equal_kept_or_computed_again_and_in_any_company(tiny_target: Target, samples):
    kept = OnlineFeatures(tiny_target, samples, 2**20)
    first = kept.batch([0, 1, 2, 3])
    again = kept.batch([0, 1, 2, 3])
    fresh = OnlineFeatures(tiny_target, samples, 0).batch([0, 1, 2, 3])
    assert torch.equal(first.hidden, again.hidden)
    assert torch.equal(first.hidden, fresh.hidden)
    alone = OnlineFeatures(tiny_target, samples, 0).batch([3])
    assert torch.equal(alone.hidden[0], first.hidden[3, :3])


def test_states_that_are_not_kept_stay_where_the_target_is(tiny_target: Target, samples, monkeypatch):
    fetched: list[int] = []
    cpu = States.cpu
    monkeypatch.setattr(States, "cpu", lambda states: fetched.append(len(states.hidden)) or cpu(states))
    OnlineFeatures(tiny_target, samples, 0, (1,)).batch([0, 1, 2, 3])
    assert not fetched
    OnlineFeatures(tiny_target, samples, 2**20, (1,)).batch([0, 1])
    assert fetched == [5, 11]


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_the_target_runs_once_for_what_fits_and_every_time_for_the_rest(
    tiny_target: Target, samples, monkeypatch, layers
):
    passes: list[int] = []
    encode = tiny_target.encode_features
    monkeypatch.setattr(tiny_target, "encode_features", lambda *args: passes.append(args[1][0]) or encode(*args))
    token = tiny_target.hidden_size * 8 * (1 + len(layers))
    limit = 17 * token  # samples of 5 and 11 fit, then nothing but a sample of 1
    features = OnlineFeatures(tiny_target, samples, limit, layers)
    features.batch([0, 1, 2, 3])
    assert passes == [5, 11, 8, 3]
    assert features.kept_bytes == 16 * token <= limit
    passes.clear()
    features.batch([0, 1, 2, 3])
    assert passes == [8, 3]
    assert "about 2 of 4 conversations fit" in features.describe()
    assert ("layers [1, 2]" in features.describe()) == bool(layers)


def test_states_can_take_part_in_a_backward_pass(tiny_target: Target, samples):
    hidden = OnlineFeatures(tiny_target, samples, 2**20).batch([0, 1]).hidden
    assert not hidden.is_inference()
    weight = torch.ones(tiny_target.hidden_size, dtype=hidden.dtype, requires_grad=True)
    (hidden * weight).sum().backward()
    torch.testing.assert_close(weight.grad, hidden.sum((0, 1)))


def test_counts_are_without_padding(tiny_target: Target, samples):
    features = OnlineFeatures(tiny_target, samples, 0)
    assert features.num_tokens([0, 1]) == 16
    assert features.num_supervised([0, 1]) == 3 + 6


def test_a_layer_that_there_is_not_is_refused(tiny_target: Target, samples):
    with pytest.raises(ValueError, match="from 1 to 2"):
        OnlineFeatures(tiny_target, samples, 0, (3,))


def test_negative_memory_is_refused(tiny_target: Target, samples):
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        OnlineFeatures(tiny_target, samples, -1)
