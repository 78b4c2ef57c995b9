"""From a run's config and its target to an untrained head, for every type of head in `heads/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from data.conversations import Encoded
from data.vocabulary import SupervisedTokens
from decode import Target
from heads import Head, HeadConfig, head_class
from heads.losses import needs_teacher
from train.config import ConfigError, RunConfig
from train.evaluate import draft_tree
from train.teacher import check_teacher

AnyHead = TypeVar("AnyHead", bound=Head)


def build_head(config: RunConfig, target: Target, samples: Sequence[Encoded], say: Callable[[str], None]) -> Head:
    """Return an untrained head of the type that `config` names, with the draft vocabulary that the data use most."""
    head = new_head(head_class(config.head_type), config, target)
    choose_vocabulary(head, config, target, samples, say)
    return head


def new_head(kind: type[AnyHead], config: RunConfig, target: Target) -> AnyHead:
    """Return an untrained head of type `kind`."""
    head_config = kind.Config(**config.head, **target_sizes(target, kind.Config))
    check_teacher(target, needs_teacher(config.head["losses"]), bias=False)  # which the head itself refuses
    return kind(head_config, target)


def choose_vocabulary(
    head: Head, config: RunConfig, target: Target, samples: Sequence[Encoded], say: Callable[[str], None]
) -> None:
    """Give a head that has a draft vocabulary the tokens that the data use most; one that starts from another, none."""
    size = head.config.draft_vocab_size
    if size is not None and config.run.init is None:
        tokens = SupervisedTokens(samples, target.vocab_size)
        vocabulary = tokens.vocabulary(size)
        head.set_vocabulary(vocabulary.token_ids)
        say(vocabulary.describe())
        say(tokens.table(size, draft_tree(head, config.eval.tree).grow.depth))


def target_sizes(target: Target, kind: type[HeadConfig]) -> dict[str, Any]:
    """Return the fields of a head's config that are the target's, such as its sizes.

    What the target's config does not know is chosen as in Llama.

    Raises:
        ConfigError: If the config has such a field that is not known here.
    """
    text = target.model.config.get_text_config()
    own: Mapping[str, Any] = {name: value for name, value in text.to_dict().items() if value is not None}
    heads = text.num_attention_heads
    sizes = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "intermediate_size": own.get("intermediate_size", own.get("n_inner", 4 * target.hidden_size)),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads", heads),
        "head_dim": own.get("head_dim", target.hidden_size // heads),
        "rms_norm_eps": own.get("rms_norm_eps", own.get("layer_norm_eps", own.get("layer_norm_epsilon", 1e-5))),
        "rope_theta": _rope_theta(own),
    }
    wanted = [item.name for item in dataclasses.fields(kind) if item.metadata.get("from_target")]
    unknown = sorted(set(wanted) - set(sizes))
    if unknown:
        raise ConfigError(f"{kind.__name__} wants {unknown} from the target; known are {sorted(sizes)}")
    return {name: sizes[name] for name in wanted}


def _rope_theta(own: Mapping[str, Any]) -> float:
    """Return the base of the rotary frequencies; of a model with several kinds of layers that of full attention."""
    rope = own.get("rope_parameters", own)
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta", own.get("rotary_emb_base", 10000.0)))
