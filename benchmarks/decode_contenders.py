"""Who decodes in the benchmarks: the engine on a backend, and transformers' DeepSeek-V4.

transformers' model has the layer count, widths, heads, window and experts of the checkpoint and
random weights. Its layers differ from V4.1 where transformers has none of V4.1's parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepinfer.config import EngineConfig, override
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.config import V41Config


class Prepared(NamedTuple):
    """Sequences that decode.

    Attributes:
        step: computes their next tokens.
        close: gives back what they hold.
    """

    step: Callable[[], object]
    close: Callable[[], object]


class EngineContender(NamedTuple):
    """The engine on the bundled checkpoint.

    Attributes:
        backend: name of the backend.
        numerics: `normative` or `exact`.
        options: `backend.options`.
    """

    backend: str
    numerics: str = "normative"
    options: tuple[tuple[str, object], ...] = ()

    def prepare(self, batch: int, context: int, num_tokens: int) -> Prepared:
        """`batch` running sequences of `context` tokens.

        Args:
            batch: sequences.
            context: tokens of each prompt.
            num_tokens: most tokens that will be decoded after it.
        """
        values: dict[str, Any] = {
            "numerics": self.numerics,
            "backend.name": self.backend,
            "backend.options": dict(self.options),
            "max_model_len": context + num_tokens + 8,
            "scheduler.max_num_seqs": batch,
            "scheduler.max_num_tokens": max(batch, 2048),
        }
        engine = LLMEngine.from_config(override(EngineConfig(), values))
        params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, detokenize=False)
        for index in range(batch):
            prompt = [(7 * index + 13 * position) % 4000 + 10 for position in range(context)]
            engine.add_request(f"r{index}", prompt, params, final_only=True)
        while engine.stats().generated_tokens < batch:
            engine.step()
        return Prepared(engine.step, engine.close)


class TransformersContender(NamedTuple):
    """transformers' DeepSeek-V4, eager, with its own cache.

    Attributes:
        device: torch's name of it.
        dtype: of weights and activations.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def prepare(self, batch: int, context: int, num_tokens: int) -> Prepared:
        """`batch` sequences of `context` tokens; a step returns the next tokens."""
        from transformers import DeepseekV4ForCausalLM

        torch.manual_seed(0)
        model = V41Config.from_json(EngineConfig().checkpoint.directory)
        net = DeepseekV4ForCausalLM(_transformers_config(model))
        net = net.to(device=self.device, dtype=self.dtype).eval()
        ids = torch.randint(10, 4000, (batch, context)).to(self.device)
        state: dict[str, Any] = {}

        def run(ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                out = net(ids, past_key_values=state.get("past"), use_cache=True)
            state["past"], state["next"] = out.past_key_values, out.logits[:, -1:].argmax(-1)
            next_ids: torch.Tensor = state["next"]
            return next_ids

        run(ids)
        return Prepared(lambda: run(state["next"]), state.clear)


Contender = EngineContender | TransformersContender


def _transformers_config(model: V41Config) -> object:
    """The checkpoint's sizes in transformers' words."""
    from transformers import DeepseekV4Config

    layers = model.num_hidden_layers
    windows = sum(model.ratio(layer) == 0 for layer in range(layers))
    return DeepseekV4Config(
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
