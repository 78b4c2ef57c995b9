"""Training-time test computes at every place what decoding computes there, step after step."""

import pytest
import torch

from heads import FeatureBatch, create_head
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.labels import find_labels
from heads.unroll import find_chains, unroll

D, V, DEPTH = 32, 320, 3
SIZES = {
    "hidden_size": D,
    "vocab_size": V,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


@pytest.fixture(params=["eagle", "eagle3"])
def head(request, tiny_target):
    if request.param == "eagle":
        config = EagleConfig(**SIZES, unroll=DEPTH)
    else:
        config = Eagle3Config(**SIZES, unroll=DEPTH, feature_layers=(1, 2))
    torch.manual_seed(0)
    return create_head(request.param, config, tiny_target).double().eval()


def make_batch(target, head, lengths, starts) -> FeatureBatch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, V, (len(lengths), max(lengths)), generator=generator)
    places = torch.arange(max(lengths))
    mask = (places >= torch.tensor(starts)[:, None]) & (places < torch.tensor(lengths)[:, None])
    hidden, features = target.encode_features(ids, lengths, head.feature_layers)
    return FeatureBatch(ids, mask, hidden, features)


def run(head, batch):
    labels = find_labels(batch, DEPTH, None)
    chains = find_chains(labels, *batch.token_ids.shape)
    fused = head.fuse(batch.hidden, batch.features)
    return chains, unroll(head.layer, head.layer_input, head.embedded(batch.token_ids), fused, chains, DEPTH)


def test_every_step_of_every_chain_is_what_the_drafter_computes(tiny_target, head):
    lengths = [13, 8]
    batch = make_batch(tiny_target, head, lengths, [4, 1])
    chains, outputs = run(head, batch)
    assert chains.valid.sum(1).tolist() == [8, 6]  # p from the token before the first root to two before the end
    for row, length in enumerate(lengths):
        for number, p in enumerate(chains.positions[row][chains.valid[row]].tolist()):
            drafter = head.drafter()
            ids = batch.token_ids[row : row + 1]
            features = None if batch.features is None else batch.features[row : row + 1, : p + 1]
            drafter.sync(ids[:, : p + 2], batch.hidden[row : row + 1, : p + 1], [p + 1], features)
            for step in range(min(DEPTH, length - 2 - p)):
                if step:
                    drafter.extend(ids[:, p + 1 + step, None], torch.tensor([[step - 1]]))
                torch.testing.assert_close(drafter._features[0, step], outputs[row, number, step])


def test_chains_start_where_root_and_label_are_supervised(tiny_target, head):
    batch = make_batch(tiny_target, head, [10], [0])
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [2, 3, 4, 7, 9]] = True
    batch = FeatureBatch(batch.token_ids, mask, batch.hidden, batch.features)
    chains = find_chains(find_labels(batch, DEPTH, None), 1, 10)
    assert chains.positions[chains.valid].tolist() == [1, 2]
    assert [int(chains.numbers[0, p]) for p in (1, 2)] == [0, 1]


def test_a_batch_without_labels_still_reaches_every_parameter(tiny_target, head):
    batch = make_batch(tiny_target, head, [6], [5])
    loss = head(batch).loss
    assert float(loss.detach()) == 0
    loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_texts_train(tiny_target, head, length):
    loss = head(make_batch(tiny_target, head, [length], [0])).loss.detach()
    assert torch.isfinite(loss)
    assert (float(loss) > 0) == (length == 3)


@pytest.mark.parametrize("setting", [{"depth_decay": -1.0}, {"depth_decay": float("nan")}, {"noise": float("nan")}])
def test_weights_that_make_a_negative_loss_or_none_are_refused_by_name(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        EagleConfig(**SIZES, **setting)
