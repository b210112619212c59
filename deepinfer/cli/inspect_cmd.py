"""`deepinfer inspect`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.options import add_common_options, resolve_config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deepinfer.model.config import V41Config
    from deepinfer.model.weights.inventory import Inventory

_EPILOG = """\
Exit code: 0 the checkpoint is complete, 1 something is missing, unexpected or misshapen, 2 it
cannot be read at all.

example:
  deepinfer inspect checkpoints/tiny-v41 --json tiny.json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect`."""
    parser = subparsers.add_parser(
        "inspect",
        help="describe a checkpoint from its headers",
        description="Describe a checkpoint: configuration, layer modes, tensors, cache sizes, "
        "and what is missing. No weights are read.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="checkpoint folder (default: that of the configuration)",
    )
    parser.add_argument(
        "--headers-only",
        action="store_true",
        help="accept shards that were cut after their headers",
    )
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `inspect`; the exit code."""
    config = resolve_config(args)
    directory = args.directory or config.checkpoint.directory

    from deepinfer.cli.console import stdout_console
    from deepinfer.cli.report import write_json
    from deepinfer.model.weights.inspection import inspection_figures
    from deepinfer.model.weights.inventory import take_inventory

    inventory = take_inventory(directory)
    if args.headers_only:
        inventory = inventory.without_data()
    console = stdout_console()
    console.print(_config_table(inventory))
    console.print(_layer_table(inventory.config))
    console.print(_tensor_table(inventory))
    console.print(_cache_table(inventory.config))
    console.print(_group_table(inventory.config))
    _print_problems(console, inventory)
    if args.json is not None:
        write_json(
            args.json, command="inspect", figures=inspection_figures(inventory), config=config
        )
    return 1 if inventory.problems() else 0


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _config_table(inventory: Inventory) -> Table:
    config = inventory.config
    scheme = config.quantization_config
    storage = "plain bf16 / fp32"
    if scheme is not None:
        storage = f"fp8 tiles 32x32, experts {scheme.expert_dtype.value}"
    candidates = "none"
    if config.candidate_source_layer_id >= 0:
        candidates = (
            f"layer {config.candidate_source_layer_id}: {config.candidate_topk_blocks} blocks "
            f"of {config.candidate_block_size}"
        )
    table = _table(f"checkpoint {inventory.folder}", "configuration", "value")
    for name, value in (
        (
            "layers / hidden / vocabulary",
            _slashed(config, "num_hidden_layers hidden_size vocab_size"),
        ),
        (
            "heads / head dim / rope dim",
            _slashed(config, "num_attention_heads head_dim qk_rope_head_dim"),
        ),
        ("query rank / output groups / rank", _slashed(config, "q_lora_rank o_groups o_lora_rank")),
        ("window / index top-k", _slashed(config, "sliding_window index_topk")),
        ("index heads / dim", _slashed(config, "index_n_heads index_head_dim")),
        ("candidates", candidates),
        (
            "experts / per token / width",
            _slashed(config, "n_routed_experts num_experts_per_tok moe_intermediate_size"),
        ),
        ("Engram layers", ", ".join(map(str, config.engram_layer_ids)) or "none"),
        (
            "Engram table rows",
            ", ".join(f"{rows:,}" for rows in config.engram_num_embeddings) or "none",
        ),
        ("draft layers / block", _slashed(config, "num_nextn_predict_layers dspark_block_size")),
        ("vision tower", "none" if config.vision_config is None else "yes (not run)"),
        ("positions", f"{config.max_position_embeddings:,}"),
        ("storage", storage),
        ("keys not used", ", ".join(config.unused_keys) or "none"),
    ):
        table.add_row(name, value)
    return table


def _slashed(config: V41Config, fields: str) -> str:
    return " / ".join(f"{getattr(config, name):,}" for name in fields.split())


def _layer_table(config: V41Config) -> Table:
    table = _table(
        "layers", "layer", "ratio", "mode", "KV source", "index source", "Engram", "candidates"
    )
    for role in config.layer_table:
        table.add_row(
            str(role.layer),
            str(role.ratio),
            role.mode.value,
            "-" if role.kv_source is None else str(role.kv_source),
            "-" if role.index_source is None else str(role.index_source),
            "yes" if role.has_engram else "",
            "source" if role.is_candidate_source else "",
        )
    return table


def _tensor_table(inventory: Inventory) -> Table:
    from deepinfer.model.weights.inspection import tensor_totals

    table = _table(
        f"tensors in {inventory.num_files} files", "part", "kind", "names", "parameters", "bytes"
    )
    tensors = parameters = num_bytes = 0
    for (group, kind), total in tensor_totals(inventory).items():
        table.add_row(
            group, kind, f"{total.tensors:,}", f"{total.parameters:,}", f"{total.bytes:,}"
        )
        tensors += total.tensors
        parameters += total.parameters
        num_bytes += total.bytes
    table.add_section()
    table.add_row("all", "", f"{tensors:,}", f"{parameters:,}", f"{num_bytes:,}")
    return table


def _cache_table(config: V41Config) -> Table:
    from deepinfer.device.numerics import Numerics
    from deepinfer.model.weights.inspection import cache_rows

    normative, exact = (cache_rows(config, mode) for mode in (Numerics.NORMATIVE, Numerics.EXACT))
    table = _table("cache bytes", "cache", "normative", "exact")
    for name, value in normative.items():
        table.add_row(name.replace("_", " "), f"{value:,}", f"{exact[name]:,}")
    return table


def _group_table(config: V41Config) -> Table:
    from deepinfer.model.cache_groups import cache_groups

    table = _table(
        "cache groups, normative", "group", "layers", "tokens a row", "bytes a token",
        "bytes a request", "cacheable", "lifetime",
    )  # fmt: skip
    for group in cache_groups(config):
        ratios = sorted({ratio for ratio in group.tokens_per_state if ratio}, reverse=True)
        table.add_row(
            group.name,
            _ranges(group.layers) or "-",
            " / ".join(map(str, ratios)) or "-",
            f"{float(group.bytes_per_token):,g}" if group.bytes_per_token else "-",
            f"{group.bytes_per_request:,}" if group.bytes_per_request else "-",
            "yes" if group.is_cacheable else "no",
            group.lifetime,
        )
    return table


def _ranges(layers: tuple[int, ...]) -> str:
    """Layer ids with runs of three and more drawn together: "0-39", "2, 8, 14, 20"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def _print_problems(console: Console, inventory: Inventory) -> None:
    from rich.text import Text

    problems = inventory.problems()
    if not problems:
        console.print(Text("complete: every tensor is there, in its shape and dtype", "green"))
        return
    for problem in problems:
        console.print(Text(problem, "red"))
