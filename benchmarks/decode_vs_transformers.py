"""Decode time per token: the reference backend against transformers' DeepSeek-V4, same run.

Both models have the same layer count, widths, heads, window and experts, random or bundled
weights in fp32, batch 8, a context of `--context` tokens. Each runs in a process of its own (two
OpenMP teams in one process slow each other down), and they take turns in blocks of steps, so that
a noisy machine hits all of them. It measures, it asserts nothing.

    pip install transformers
    python benchmarks/decode_vs_transformers.py --json decode_vs_transformers.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from deepinfer.cli.report import write_json
from deepinfer.config import EngineConfig
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.config import V41Config

PEER = "transformers fp32"


def engine_step(config: EngineConfig, batch: int, context: int) -> Callable[[], object]:
    """A decode step of the engine with `batch` running sequences of `context` tokens."""
    engine = LLMEngine.from_config(config)
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, detokenize=False)
    for index in range(batch):
        prompt = [(7 * index + 13 * position) % 4000 + 10 for position in range(context)]
        engine.add_request(f"r{index}", prompt, params)
    while engine.stats().generated_tokens < batch:
        engine.step()
    return engine.step


def transformers_step(model: V41Config, batch: int, context: int) -> Callable[[], object]:
    """A decode step of transformers' DeepSeek-V4 with equal sizes."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    layers = model.num_hidden_layers
    windows = sum(model.ratio(layer) == 0 for layer in range(layers))
    config = DeepseekV4Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        moe_intermediate_size=model.moe_intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        q_lora_rank=model.q_lora_rank,
        num_experts_per_tok=model.num_experts_per_tok,
        n_routed_experts=model.n_routed_experts,
        layer_types=["sliding_attention"] * windows
        + ["compressed_sparse_attention"] * (layers - windows),
        mlp_layer_types=["moe"] * layers,
        hc_mult=model.hc_mult,
        hc_sinkhorn_iters=model.hc_sinkhorn_iters,
        sliding_window=model.sliding_window,
        o_groups=model.o_groups,
        o_lora_rank=model.o_lora_rank,
        index_n_heads=model.index_n_heads,
        index_head_dim=model.index_head_dim,
        index_topk=model.index_topk,
        max_position_embeddings=model.max_position_embeddings,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    net = DeepseekV4ForCausalLM(config).float().eval()
    ids = torch.randint(10, 4000, (batch, context))
    state: dict[str, Any] = {}
    with torch.no_grad():
        out = net(ids, use_cache=True)
    state["past"], state["next"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def step() -> None:
        with torch.no_grad():
            out = net(state["next"], past_key_values=state["past"], use_cache=True)
        state["past"], state["next"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    return step


def serve(name: str, config: EngineConfig, args: argparse.Namespace, pipe: Connection) -> None:
    """Child process: for every message received, send the seconds that a block of steps took."""
    if name == PEER:
        model = V41Config.from_json(config.checkpoint.directory)
        step: Callable[[], object] = transformers_step(model, args.batch, args.context)
    else:
        step = engine_step(config, args.batch, args.context)
    pipe.send(0.0)
    while pipe.recv():
        step()  # wakes the threads, which went to sleep while the others had their turn
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        pipe.send(time.perf_counter() - start)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    length = args.context + 4 * args.rounds * args.steps
    configs = {
        "deepinfer exact": EngineConfig(numerics="exact", max_model_len=length),
        "deepinfer normative": EngineConfig(numerics="normative", max_model_len=length),
        PEER: EngineConfig(),
    }
    context, pipes = get_context("spawn"), {}
    for name, config in configs.items():
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(name, config, args, theirs), daemon=True).start()
        pipes[name].recv()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(args.rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            times[name].append(pipe.recv() / args.steps)
        print(f"\rround {turn + 1} of {args.rounds}", end="", flush=True)
    print()
    for pipe in pipes.values():
        pipe.send(False)
    per_token = {
        name: statistics.median(values) / args.batch * 1e3 for name, values in times.items()
    }
    peer = per_token[PEER]
    print(f"{'':22}{'ms/token':>10}{'ratio':>8}   (batch {args.batch}, median of {args.rounds})")
    for name, value in per_token.items():
        print(f"{name:22}{value:10.3f}{value / peer:8.2f}")
    if args.json:
        figures = {
            "ms_per_token": per_token,
            "ratio_to_transformers": {name: value / peer for name, value in per_token.items()},
            "batch": args.batch,
            "context": args.context,
            "threads": torch.get_num_threads(),
        }
        write_json(args.json, "decode_vs_transformers", figures)


if __name__ == "__main__":
    main()
