# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Rollback is a selection
#
# After a verify, some candidates are wrong and must leave no trace. With attention alone that is easy: keys
# and values of the wrong rows are not kept. A *hybrid* target (Qwen3.5) also carries recurrent states, and
# a state mixes everything that went through it. Three ways to get the state after the accepted tokens, and
# only them:
#
# | strategy | what a verify leaves behind | what a commit does |
# |---|---|---|
# | `states` | the state after every node | picks one |
# | `tape` (default) | per node a key, a correction and a decay | one masked matrix product |
# | `replay` | nothing | forwards the accepted tokens again, from the old state |
#
# Replay is the slow reference: what other implementations call snapshot and restore. Here they are compared
# on a small hybrid target with random weights.

# %%
import dataclasses
import os

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from dflash_jax import decode, stepwise, targets, testing
from dflash_jax.block import chain_block, tree_block
from dflash_jax.cache import RecurrentState, trail_bytes
from dflash_jax.compile_cache import keep_compiled
from dflash_jax.config import RecurrentConfig
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from infer.rollback import QWEN35_27B, chain_of, strategies, weights

keep_compiled()
plt.rcParams["figure.dpi"] = 80
SMALL = "DFLASH_NOTEBOOK_SMOKE" in os.environ  # CI runs every notebook at a smaller size

config = testing.target_config("qwen3_5", num_layers=2)
models = testing.make_models(config, testing.draft_config(config))
print("layers:", ", ".join(config.layer_types))
print("gated delta layers:", config.recurrent)

# %% [markdown]
# ## A tree of candidates
#
# Node 0 is the anchor. 1 and 4 are alternatives after it, and so on:
#
#     0 - 1 - 2 - 3
#      \- 4 - 5
#
# One verify looks at all six nodes. Whatever the target says, one root path of this tree will be committed.

# %%
options = Options(Fixed(6))
state = decode.prefill(models, [[3, 1, 4, 1, 5]], options, max_new_tokens=32)
tokens = jnp.asarray([[int(state.anchor[0]), 2, 7, 1, 8, 2]], jnp.int32)
block = tree_block(tokens, jnp.asarray([[-1, 0, 1, 2, 0, 4]], jnp.int32))
paths = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [0, 4], 5: [0, 4, 5]}

slots = state.target_cache.slots
trails = {
    name: decode.verify_step(models, state, block, slots, dataclasses.replace(options, rollback=name)).trail
    for name in ("tape", "states")
}


def committed(name, path):
    """The cache after the nodes of `path`, from what a verify left behind. Entries beyond the count are filler."""
    filled = jnp.asarray([path + [0] * (6 - len(path))], jnp.int32)
    return decode.commit_step(state.target_cache, trails[name], filled, jnp.asarray([len(path)], jnp.int32))


def replayed(path):
    """The same by forwarding the tokens of `path` one after the other, from the cache as it was."""
    now = state
    for node in path:
        row = chain_block(tokens[:, node : node + 1])
        trail = decode.verify_step(models, now, row, slots, options).trail
        zero, one = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        now = dataclasses.replace(now, target_cache=decode.commit_step(now.target_cache, trail, zero, one))
    return now.target_cache


for layer, left in enumerate(trails["tape"]):
    print(f"layer {layer} leaves a {type(left).__name__}:", {k: v.shape for k, v in vars(left).items()})

# %% [markdown]
# ## The state after every node
#
# All three strategies give one state, for each of the six nodes, up to the order of summation. For
# comparison, what would be left without a rollback: the state after all six rows in a line, as a sequential
# kernel would leave it, which differs by about as much as the state itself is large.


# %%
def recurrent(cache):
    return np.concatenate([np.ravel(x.s) for x in cache.layers if isinstance(x, RecurrentState)])


reference = {node: recurrent(replayed(path)) for node, path in paths.items()}
size = np.abs(reference[0]).max()
off = {
    name: [np.abs(recurrent(committed(name, path)) - reference[node]).max() for node, path in paths.items()]
    for name in ("tape", "states")
}
everything = recurrent(replayed([0, 1, 2, 3, 4, 5]))
off["no rollback"] = [np.abs(everything - reference[node]).max() for node in paths]
assert max(off["tape"] + off["states"]) < 1e-4 * size
assert min(off["no rollback"]) > 0.1 * size

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for i, (name, values) in enumerate(off.items()):
    axes.bar(np.arange(6) + 0.27 * (i - 1), np.maximum(values, 1e-9), 0.25, label=name)
axes.axhline(size, color="black", ls=":", lw=1, label="largest entry of the state")
axes.set(yscale="log", xlabel="node that the walk ended at", ylabel="difference from replay")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
plt.show()

# %% [markdown]
# ## The text is the same, whichever is used
#
# Whole generations by every strategy, against autoregressive decoding. A random draft is never right, so
# this one recites the target's own text (`testing.scripted`), wrong at a third of the positions: rounds end
# at every length.

# %%
alone = decode.finish(decode.generate_autoregressive(models, state)).tokens
text = [3, 1, 4, 1, 5, *alone[0]]
wrong = np.random.default_rng(0).random((1, len(text))) < 1 / 3
reciting = testing.scripted(models, [text], wrong)
for name in ("tape", "states", "replay"):
    chosen = dataclasses.replace(options, rollback=name)
    *_, (last, _) = stepwise.generate_stepwise(reciting, state, chosen)
    done = decode.finish(last)
    assert done.tokens == alone, name
    print(f"{name:7} tokens per round {done.committed[0]}, tau {done.tau:.2f}")

# %% [markdown]
# ## What it costs in memory
#
# What a verify leaves behind until it is committed, for the shape of Qwen3.5-27B (64 layers, three of four
# recurrent; float32 states and tapes, bfloat16 keys and values). A node of a tape is some fifty times smaller
# than a state.

# %%
deep = dataclasses.replace(QWEN35_27B, num_layers=64, layer_types=QWEN35_27B.layer_types * 16)
nodes = [1, 2, 4, 8, 16, 32, 64]
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, style in (("states", "s-"), ("tape", "o-")):
    sizes = [trail_bytes(deep, 1, n, 2, name) / 2**20 for n in nodes]
    axes.loglog(nodes, sizes, style, label=name)
    print(f"{name:7} 16 nodes: {sizes[nodes.index(16)]:,.0f} MiB")
axes.set(xlabel="nodes verified", ylabel="MiB until the commit", xticks=nodes, xticklabels=nodes)
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What it costs in time
#
# One gated delta layer, 16 rows verified, 8 of them committed. `infer.rollback` times it with random
# weights (at the size of Qwen3.5-27B: `python -m infer.rollback --parts layer`; here a quarter as wide).
# `tape` pays a small product at the commit; `states` pays for writing sixteen states in the forward;
# `replay` pays for eight forwards of one row, each of which reads all weights again.

# %%
wide = dataclasses.replace(
    QWEN35_27B,
    hidden_size=256 if SMALL else 1280,
    intermediate_size=512 if SMALL else 4352,
    recurrent=RecurrentConfig(key_heads=4, value_heads=12, key_dim=128, value_dim=128),
)
layer = weights(targets.abstract_params(wide)["layers_0"])
times = strategies(wide, layer, chain_of(16), accepted=8, repeats=2 if SMALL else 15)
assert max(found["difference"] for found in times.values()) < 1e-3

figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
names = list(times)
forward, commit = ([times[name][f"{part}_cpu_ms"] for name in names] for part in ("forward", "commit"))
axes.barh(names, forward, label="forward of 16 rows")
axes.barh(names, commit, left=forward, label="commit of 8")
axes.set(xlabel="processor time, ms (medians)")
axes.invert_yaxis()
axes.legend(frameon=False)
plt.show()
for name, found in times.items():
    print(f"{name:7} leaves {found['trail_mib']:.2f} MiB; difference from replay {found['difference']:.0e}")
