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
# # One round by hand
#
# A DFlash round is four functions: **propose** (the draft, one pass), **verify** (the target, one pass over
# all candidates), **judge** (walk along the candidates while the target agrees) and **write** (commit that
# path). Here each runs alone, on SmolLM2-135M and the draft that ships with this repository, and what
# passes between them is shown.
#
# The point to look for: verify writes nothing. What it computed comes back as a *trail*, and the next cache
# is a selection from it. An old state stays good, so there is no rollback code.

# %%
import os

import jax
import matplotlib.pyplot as plt
import numpy as np

from dflash_jax import decode, pair, stepwise
from dflash_jax.compile_cache import keep_compiled
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from dflash_jax.tree import TreeShape

keep_compiled()  # programs are kept in the user's cache folder: the second run of this notebook is quick
plt.rcParams["figure.dpi"] = 80
budget = 12 if "DFLASH_NOTEBOOK_SMOKE" in os.environ else 32  # new tokens; CI runs every notebook smaller

loaded = pair.load("smollm2")
models, tokenizer = loaded.models, loaded.target.tokenizer


def word(token):
    return tokenizer.decode([int(token)], skip_special=False)


def shapes(tree):
    """How many arrays of each type and shape a pytree holds."""
    found = {}
    for leaf in jax.tree.leaves(tree):
        key = f"{leaf.dtype}{list(leaf.shape)}"
        found[key] = found.get(key, 0) + 1
    return ", ".join(f"{count} x {key}" for key, count in found.items())


print(f"target: {loaded.target.config.num_layers} layers, {loaded.target.config.hidden_size} wide")
print(f"draft: {loaded.draft.config.num_layers} layers, blocks of up to {loaded.draft.config.block_size}")
print("taps (target layers whose outputs the draft sees):", models.taps)

# %% [markdown]
# ## Prefill
#
# The prompt goes through the target once. What stays of it: keys and values of every target layer, and the
# draft's **context**, which are the tapped layers' outputs, fused to one vector a position and projected to
# the keys and values of every draft layer. The last logits give the first token. It is the **anchor**:
# emitted, but in no cache yet.

# %%
options = Options(Fixed(6))  # blocks of 6: the anchor and 5 candidates
prompt = tokenizer.chat([{"role": "user", "content": "Write a Python function that adds two numbers."}])
stops = loaded.target.stop_ids
state = decode.prefill(models, [prompt], options, max_new_tokens=budget, stop_ids=stops, capacity=128)

print(len(prompt), "prompt tokens; committed:", int(state.target_cache.length[0]))
print("anchor:", repr(word(state.anchor[0])))
print("target cache: ", shapes(state.target_cache.layers))
print("draft context:", shapes(state.draft_cache.layers))

# %% [markdown]
# ## Propose
#
# The draft's input is `[anchor, MASK, MASK, MASK, MASK, MASK]`, embedded with the target's table. It sees
# its context, and within the block every row sees every other one. One pass gives a distribution for each
# of the five positions, and here the best token of each is taken. They do not depend on each other: nothing
# tells the third position what the second one chose. (The last figure below has the masks.)

# %%
slots = (
    state.target_cache.slots
)  # what attention reads: all. The compiled loop takes the shortest prefix that does
drafted = decode.propose_step(models, state, options, 6, slots)
block = drafted.candidates.block
survives = np.exp(np.asarray(drafted.candidates.weight[0]))

print("block:", shapes(block))
for token, chance in zip(block.tokens[0, 1:], survives[1:], strict=True):
    print(f"{word(token)!r:12} the draft gives {chance:.3f} to the path up to here")

# %% [markdown]
# ## Verify
#
# One forward of the target over all six tokens. Row i of the logits is what the target says after row i of
# the block. The trail holds the keys and values of these six rows, for every layer: 30 layers, k and v.

# %%
output = decode.verify_step(models, state, block, slots, options)
print("logits:  ", shapes(output.logits))
print("features:", shapes(output.features), "(tapped layers side by side)")
print("trail:   ", shapes(output.trail))

# %% [markdown]
# ## Judge
#
# From the anchor, follow the candidate that equals the target's choice. Where none does, the target's own
# choice is emitted instead. So a round yields at least one token, and exactly the tokens that
# autoregressive decoding would.

# %%
verified = decode.judge_step(state, drafted, output, options)
accepted = verified.acceptance
count = int(accepted.count[0])

print(f"{'after':12}{'target says':14}candidate")
for i in range(count):
    candidate = word(block.tokens[0, i + 1]) if i < 5 else ""
    agrees = "accepted" if i < count - 1 else "rejected: the target's choice is emitted"
    print(f"{word(block.tokens[0, i])!r:12}{word(accepted.choices[0, i])!r:14}{candidate!r:12}{agrees}")
print("tokens of this round:", [word(token) for token in accepted.tokens[0, :count]])

# %% [markdown]
# ## Write
#
# `cache.commit` takes the rows of the path out of the trail and appends them: the anchor's and those of the
# accepted candidates. The last token of the round is the next anchor ("implicit bonus": it is emitted now
# and forwarded in the next round). The accepted rows' features extend the draft's context.

# %%
after, trace = decode.write_step(models, state, verified, options)
before, now = int(state.target_cache.length[0]), int(after.target_cache.length[0])
print(f"committed: {before} -> {now}; next anchor: {word(after.anchor[0])!r}")
assert now - before == count
assert now == len(prompt) + int(after.emitted[0]) - 1  # the anchor is in no cache: true of every state

# %% [markdown]
# ## A generation is these four in a loop
#
# The old state was not touched. Both it and the new one are continued by hand here, and both give the text
# of autoregressive decoding, which is the same machinery with blocks of one row. (`decode.generate` is this
# loop as one compiled `lax.while_loop`.)


# %%
def by_hand(state):
    while not state.done.all():
        drafted = decode.propose_step(models, state, options, 6, slots)
        output = decode.verify_step(models, state, drafted.candidates.block, slots, options)
        verified = decode.judge_step(state, drafted, output, options)
        state, _ = decode.write_step(models, state, verified, options)
    return decode.finish(state)


old, new = by_hand(state), by_hand(after)
alone = decode.finish(decode.generate_autoregressive(models, state))
assert old.tokens == new.tokens == alone.tokens  # lossless

print(tokenizer.decode(old.tokens[0]))
print("\ntokens per round:", old.committed[0])
print(f"tau, their mean: {old.tau:.2f}; rounds: {len(old.committed[0])} instead of {len(alone.committed[0])}")

# %% [markdown]
# ## The same round with a tree
#
# A chain ends at its first wrong token. A tree spends its candidates on alternatives: the draft's
# distributions rank all prefixes, and the heaviest 12 become the tree (DDTree, arXiv 2604.12989). It is
# verified in the same forward. Green is where the target went; the dashed box is the token that it chose
# itself at the end of the walk.


# %%
def positions(parents, depth):
    """Of a drawing: a node's column is its depth; leaves get rows in depth-first order, parents their middle."""
    children = [[i for i, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    rows, place = iter(range(len(parents))), {}

    def visit(node):
        for child in children[node]:
            visit(child)
        heights = [place[child][1] for child in children[node]]
        place[node] = (depth[node], float(np.mean(heights)) if heights else -next(rows))

    visit(0)
    return place


def box(axes, x, y, token, colour, style="-"):
    text = repr(word(token))[1:-1] if word(token).strip() else repr(word(token))
    frame = {"boxstyle": "round", "fc": "white", "ec": colour, "ls": style}
    axes.text(x, y, text, ha="center", va="center", bbox=frame, fontsize=8, parse_math=False)


def draw(axes, block, accepted):
    tokens, parents, depth = (np.asarray(x[0]).tolist() for x in (block.tokens, block.parents, block.depth))
    walked = np.asarray(accepted.path[0, : int(accepted.count[0])]).tolist()
    end, own = walked[-1], len(tokens)  # the target's own choice is drawn as one node more
    tokens, parents, depth = [*tokens, accepted.choices[0, end]], [*parents, end], [*depth, depth[end] + 1]
    place = positions(parents, depth)
    for node, (x, y) in place.items():
        green, style = node in (*walked, own), "--" if node == own else "-"
        colour, width = ("tab:green", 2) if green else ("0.6", 0.8)
        if node:
            above = place[parents[node]]
            axes.plot([above[0], x], [above[1], y], style, color=colour, lw=width, zorder=0)
        box(axes, x, y, tokens[node], colour, style)
    axes.set_axis_off()
    axes.margins(0.12)


branched = Options(Fixed(6, 13), tree=TreeShape(12))  # 12 candidates and the anchor
stepped = list(stepwise.generate_stepwise(models, state, branched))
assert decode.finish(stepped[-1][0]).tokens == alone.tokens  # lossless too
rounds = [trace for _, trace in stepped]

figure, axes = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")
for number, (panel, trace) in enumerate(zip(axes, rounds, strict=False), 1):
    draw(panel, trace.block, trace.acceptance)
    panel.set_title(f"round {number}: {int(trace.kept[0])} tokens")
plt.show()
print(f"rounds: {len(rounds)} with trees of 12 candidates, {len(old.committed[0])} with chains of 5")

# %% [markdown]
# ## Who sees what
#
# Everyone sees all committed positions. Within the block, row i sees the dark columns: in the draft
# everything; in the target its ancestors, which for a chain are a triangle. `Block.ancestors` is that mask,
# and a chain is the tree with one branch.

# %%
assert not any(models.draft.config.causal)
masks = {
    "draft": np.ones((6, 6)),
    "target, chain": np.asarray(block.ancestors[0]),
    "target, tree of round 1": np.asarray(rounds[0].block.ancestors[0]),
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for panel, (name, mask) in zip(axes, masks.items(), strict=True):
    panel.imshow(mask, cmap="Greys", vmin=0, vmax=1.3)
    panel.set(title=name, xlabel="seen", ylabel="row", xticks=range(len(mask)), yticks=range(len(mask)))
plt.show()
