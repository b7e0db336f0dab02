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
# # Block size, depth, tree budget
#
# The paper's tables ask how much to draft. On Qwen3-8B at temperature 0:
#
# | what | tau | speed |
# |---|---|---|
# | draft of 3, 5, 8 layers (Math500) | 5.64, 5.99, 6.33 | best with 5 |
# | trained with blocks of 16, decoded with blocks of 8 | 5.09 | |
# | chain, tree (HumanEval; DDTree, arXiv 2604.12989) | 6.61, 9.67 | 4.84x, 6.90x |
#
# More candidates raise tau, by less and less; speed has an optimum, since candidates cost. This notebook
# looks for the same shapes on SmolLM2-135M with the shipped draft (2 layers, blocks of 6) and a CPU. The
# numbers are smaller: the draft has seen little text, and on a CPU rows are far from free.

# %%
import os
from functools import partial

import matplotlib.pyplot as plt
import numpy as np

from dflash_jax import decode, pair
from dflash_jax.block import chain_block
from dflash_jax.compile_cache import keep_compiled
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from infer.bench.arms import AR, arms
from infer.bench.figures import Answers, figures
from infer.bench.measure import Bench, Prompt
from infer.session import Session
from infer.settings import Settings
from infer.timing import interleaved

keep_compiled()
plt.rcParams["figure.dpi"] = 80
SMALL = "DFLASH_NOTEBOOK_SMOKE" in os.environ  # CI runs every notebook at a smaller size

questions = [
    "Write a Python function that adds two numbers.",
    "List the planets of the solar system.",
    "Write a short poem about the sea.",
    "A pen costs 3 dollars. How much do 7 pens cost? Think step by step.",
][: 1 if SMALL else None]
new_tokens = 8 if SMALL else 40
block_sizes, budgets, depths = ((6,), (8,), (1, 3)) if SMALL else ((2, 4, 6), (8, 16, 32), (1, 3, 5))

loaded = pair.load("smollm2")
prompts = [Session(loaded).prompt(question) for question in questions]

# %% [markdown]
# ## Measure
#
# What `python -m infer bench --compare ar,chain,tree` does: every prompt is prefilled once, and every arm
# decodes from that state, in turns. Compiling is apart. All answers are the autoregressive ones, token for
# token. The speeds below were taken on one core of a busy machine, so they are ratios of processor time;
# the README has those of two cores.

# %%
settings = Settings(max_new_tokens=new_tokens)
chains = arms(loaded, ("chain",), block_sizes, (), settings)  # the first is autoregressive decoding
trees = arms(loaded, ("tree",), (6,), budgets, settings)[1:]
bench = Bench(loaded, [*chains, *trees], settings, max(map(len, prompts)) + 40)
asked = [Prompt("here", line, tuple(tokens)) for line, tokens in enumerate(prompts)]

bench.warm_up(asked[0])
measured = [record for turn, prompt in enumerate(asked) for record in bench.measure(prompt, turn, 1)]
alone = {record.line: record.tokens for record in measured if record.arm == AR}
assert all(record.tokens == alone[record.line] for record in measured)  # lossless

found = {arm.name: figures(Answers(measured), arm) for arm in bench.arms}
print(f"{'arm':12}{'tau':>6}{'rows':>6}{'speed (CPU time), autoregressive = 1':>40}")
for name, of in found.items():
    print(f"{name:12}{of['tau']:6.2f}{of['rows_per_round']:6.0f}{of['cpu_ratio']['median']:40.2f}")

# %% [markdown]
# ## Block size and tree budget
#
# **Block size.** The first candidates of a large block are those of a small one, nearly: in training every
# block has its full size, and rows see each other. So one run with blocks of 6 foretells the smaller ones:
# tau is 1 + the shares of rounds that kept candidate 1, 2, ... That curve flattens as the candidates get
# worse, and speed only falls here.
#
# **Tree budget.** With the same pass of the draft, a tree's candidates cover several continuations, and tau
# keeps rising as the budget doubles. Where verifying is bound by reading the weights (a large model on an
# accelerator), 32 rows cost about what one costs, and that is speed; on a CPU they do not.

# %%
kept = found["chain-6"]["acceptance_by_position"]
sizes = [1, *block_sizes]
figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained", width_ratios=(1, 1, 1.2))
axes[0].plot(range(1, 7), 1 + np.cumsum([0, *kept]), "--", color="0.5", label="foretold by blocks of 6")
axes[0].plot(sizes, [1, *(found[f"chain-{size}"]["tau"] for size in block_sizes)], "o-", label="measured")
axes[0].set(xlabel="block size of the chain", ylabel="tau (tokens per round)", ylim=(0.9, None))
axes[1].plot(
    budgets, [found[f"tree-6-{budget}"]["tau"] for budget in budgets], "s-", color="C1", label="tree"
)
axes[1].axhline(found["chain-6"]["tau"], color="C0", ls="--", label="chain of 5 candidates")
axes[1].set_xscale("log", base=2)
axes[1].set(xlabel="tree budget (candidates)", ylabel="tau", ylim=(0.9, None))
axes[1].set_xticks(budgets, budgets)
for panel in axes[:2]:
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
speeds = [of["cpu_ratio"]["median"] for of in found.values()]
axes[2].barh(list(found), speeds, color=["0.6"] + ["C0"] * len(block_sizes) + ["C1"] * len(budgets))
axes[2].axvline(1, color="black", lw=0.8, ls=":")
axes[2].invert_yaxis()
axes[2].set(xlabel="speed in CPU time, autoregressive = 1")
plt.show()
if not SMALL:
    assert found["chain-2"]["tau"] < found["chain-6"]["tau"] < found["tree-6-32"]["tau"]

# %% [markdown]
# ## Depth
#
# Only one depth ships, so this is the half of the table that can be had without training: what depth
# *costs*. Time does not depend on the values of the weights, so drafts of chance tell it exactly. The other
# half, tau by depth, needs drafts that were trained for as long as they need; a toy of a few hundred steps
# (notebook 03) would only show which depth learns fastest.
#
# A round must commit as many tokens as it costs autoregressive steps: that is the tau at which a draft of
# this depth breaks even, and the slope is what a further layer has to bring. In the paper, 2 layers more (3
# to 5) brought 6 % and paid; 3 more (5 to 8) brought another 6 % and did not.

# %%
options = Options(Fixed(6))
runs = {}
for depth in depths:
    draft = pair.random_draft(loaded.target, num_layers=depth, block_size=6, mask_token_id=3)
    models = loaded.with_draft(draft).models
    state = decode.prefill(models, [prompts[0]], options, max_new_tokens=32)
    slots = state.target_cache.slots
    runs[depth] = partial(decode.propose_step, models, state, options, 6, slots)
block = runs[depths[0]]().candidates.block
for name, rows in (("verify", block), ("step", chain_block(block.tokens[:, :1]))):
    runs[name] = partial(decode.verify_step, models, state, rows, slots, options)
times = dict(zip(runs, interleaved(list(runs.values()), 3 if SMALL else 25), strict=True))
costs = {name: time / times["step"] for name, time in times.items()}  # in steps: seconds are this machine's
even = [costs[depth] + costs["verify"] for depth in depths]

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.bar(depths, [costs["verify"]] * len(depths), 0.8, label="verify of 6 rows", color="0.7")
axes.bar(depths, [costs[d] for d in depths], 0.8, [costs["verify"]] * len(depths), label="draft", color="C0")
axes.set(xlabel="layers of the draft", ylabel="autoregressive steps\n= tau to break even", xticks=depths)
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
for depth, tau in zip(depths, even, strict=True):
    print(f"{depth} layers: the draft costs {costs[depth]:.2f} steps, a round breaks even at tau {tau:.2f}")
assert SMALL or costs[1] < costs[5]

# %% [markdown]
# Most of a shallow draft's cost is the head over 49,152 tokens, which every depth pays once; a layer, as
# wide as one of the target's 30, adds a few hundredths of a step. What the whole comparison says of a
# machine of yours:
#
#     python -m infer bench --target T --draft D --dataset FILE --compare ar,chain,tree \
#         --block-sizes 4,8,16 --tree-budgets 8,16,32,64
