"""Greedy answers to prompts of every domain, with the drafts at each of their positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig, override
from deepinfer.device.errors import RequestError
from deepinfer.engine.outputs import RequestOutput
from deepinfer_training.calibration import Rollouts, accepted_drafts
from deepinfer_training.documents import Document, Generators
from deepinfer_training.drafter import Anchors, draft_greedily
from deepinfer_training.evaluation import Model
from deepinfer_training.natural_text import DOMAIN_SOURCES, NaturalText
from deepinfer_training.sequences import DOMAINS, Split, document_rng

_OPENING_TOKENS = 24
_NATURAL_TOKENS = 64
_RECALL_TOKENS = 320
_ANSWERS_AT_ONCE = 8


def prompts(
    make: Generators, natural: NaturalText, split: Split, seed: int, per_domain: int
) -> tuple[list[list[int]], Tensor]:
    """Prompts as a user would send them, and their domains [B] int64.

    A span of natural text, the opening of a tale, or a document up to one of its answers (its
    first half, if nothing in it is asked).
    """
    found = []
    for number, domain in enumerate(DOMAINS):
        for index in range(per_domain):
            rng = document_rng(split, seed, number * per_domain + index)
            if domain in DOMAIN_SOURCES:
                found.append([make.text.bos, *natural.span(rng, domain, _NATURAL_TOKENS)])
                continue
            document: Document = (
                make.recall(rng, _RECALL_TOKENS)
                if domain == "recall"
                else getattr(make, domain)(rng)
            )
            weights = document.weights
            starts = [i for i in range(1, len(weights)) if weights[i] == 1.0 > weights[i - 1]]
            stop = rng.choice(starts) if starts else len(weights) // 2
            found.append(document.ids[: stop + (_OPENING_TOKENS if domain == "tales" else 0)])
    return found, torch.arange(len(DOMAINS)).repeat_interleave(per_domain)


def greedy_answers(
    checkpoint: Path,
    asked: Sequence[Sequence[int]],
    max_tokens: int,
    on_finished: Callable[[RequestOutput], None],
    *,
    backend: str = "reference",
) -> list[list[int]]:
    """The engine's answers in normative numerics, end tokens included.

    Args:
        checkpoint: folder.
        asked: prompts.
        max_tokens: length of an answer.
        on_finished: told of every answer.
        backend: that answers.
    Raises:
        DeepInferError: checkpoint or backend cannot be had, or a prompt is refused.
    """
    config = override(
        EngineConfig(),
        {
            "checkpoint.path": str(checkpoint), "numerics": "normative", "backend.name": backend,
            "scheduler.max_num_seqs": 256, "scheduler.max_num_tokens": 8192,
        },
    )  # fmt: skip
    with LLM(config) as llm:
        outputs = llm.generate(
            [list(ids) for ids in asked],
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
            on_finished=on_finished,
        )
    for output in outputs:
        if output.error is not None:
            raise RequestError(f"{output.request_id}: {output.error}")
    return [output.outputs[0].token_ids for output in outputs]


@torch.no_grad()
def draft_over(
    model: Model,
    parameters: Mapping[str, Tensor],
    asked: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    domains: Tensor,
) -> Rollouts:
    """Draft after every token of every answer, and verify against what follows.

    Args:
        model: the target that answered.
        parameters: of the drafter and the target's embedding and head.
        asked: prompts.
        answers: of the same order; one token at least.
        domains: [B] int64.
    """
    size, longest = model.arch.dspark_block_size, max(map(len, answers))
    # An answer of one token has no anchor: nothing is left to draft.
    accepted = torch.zeros((len(asked), longest), dtype=torch.int64)
    num_left = torch.zeros_like(accepted)
    features: list[Tensor] = []
    order = sorted(range(len(asked)), key=lambda i: len(asked[i]) + len(answers[i]))
    by_row: dict[int, Tensor] = {}
    for first in range(0, len(order), _ANSWERS_AT_ONCE):
        rows = order[first : first + _ANSWERS_AT_ONCE]
        # Room for a block after the last anchor.
        ids, documents = model.padded(
            [[*asked[i], *answers[i], *[model.arch.pad_token_id] * size] for i in rows]
        )
        starts = torch.tensor([len(asked[i]) for i in rows])
        lengths = torch.tensor([len(answers[i]) for i in rows])
        steps = torch.arange(longest)
        positions = starts.unsqueeze(1) + torch.minimum(steps, (lengths - 1).unsqueeze(1))
        rotation = model.planner.plain_rotation(ids.shape[1] + size)
        drafts = draft_greedily(
            parameters, model.arch, ids, model.run(ids, documents).taps,
            Anchors(positions, documents, rotation), model.numerics,
        )  # fmt: skip
        left = (lengths.unsqueeze(1) - 1 - steps).clamp(0, size)
        counts = accepted_drafts(drafts.tokens, ids, positions, left)
        for place, row in enumerate(rows):
            accepted[row] = counts[place]
            num_left[row] = left[place]
            by_row[row] = drafts.features[place]
    features = [by_row[row] for row in range(len(asked))]
    return Rollouts(accepted, num_left, torch.stack(features), domains)
