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
# # Train a draft, and watch tau rise
#
# A draft learns what its target says, so the target makes the data. Here everything is small: a target over
# bytes that learns exercises (counting, spelling, weekdays), its answers to prompts, and a draft of two
# layers for it. The commands are those of `configs/tiny.toml`, with fewer steps; at its full size (eight
# minutes on two cores) the draft commits 4.3 tokens a round.

# %%
import contextlib
import io
import json
import os
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from dflash_jax import decode, pair
from dflash_jax.generation import DraftWarning
from dflash_jax.policy import Fixed
from dflash_jax.state import AUTOREGRESSIVE, Options
from train import records
from train.__main__ import main
from train.exercises import exercises

plt.rcParams["figure.dpi"] = 80
SMALL = "DFLASH_NOTEBOOK_SMOKE" in os.environ  # CI runs every notebook at a smaller size
workplace = tempfile.TemporaryDirectory()
os.chdir(workplace.name)


def train(command):
    """`python -m train ...`, without its progress lines."""
    progress = io.StringIO()
    with contextlib.redirect_stderr(progress):
        status = main(command.split())
    assert status == 0, progress.getvalue()


# %% [markdown]
# ## A target
#
# Three layers, 330,000 weights, trained with cross-entropy on questions and answers as a chat model is. It
# is written as a Hugging Face folder.

# %%
shared = "--config tiny --run.folder run --target run/target"
shared += " --language_model.layers 1 --model.layers 1" if SMALL else ""
steps = 4 if SMALL else 220
train(f"target {shared} --language_model.length 128 --language_model.steps {steps}")

# %% [markdown]
# ## Its own words
#
# The draft must foretell the target, mistakes included: a dataset's answers would teach it somebody else's
# words. So the prompts are answered by the target. (`python -m train synthesize` makes the prompts with the
# target as well.)


# %%
def questions(seed):
    """All different, without the long ones about animals: with an answer they exceed 128 positions."""
    return [q for q in dict.fromkeys(question for question, _ in exercises(900, seed)) if len(q) < 50]


asked = questions(seed=7)[: 40 if SMALL else 300]
Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in asked))
train(
    f"regenerate {shared} --regenerate.prompts prompts.jsonl --regenerate.answer_tokens {16 if SMALL else 56} "
    "--regenerate.rows 64 --regenerate.temperature 0.2"
)
answers = [json.loads(line)["messages"] for line in Path("run/regenerated.jsonl").read_text().splitlines()]
for question, answer in answers[:3]:
    print(f"{question['content']}\n    {answer['content']}")

# %% [markdown]
# ## Fit
#
# Every step draws anchors at random in the answers. A block is the anchor and seven masks; it sees the
# target's features strictly before its anchor, and itself; slot k predicts the k-th token after the anchor,
# weighted $e^{-(k-1)/\gamma}$: early slots matter most, because a wrong one ends the round. Evaluations are
# on conversations that are never trained on.

# %%
steps, often = (4, 2) if SMALL else (200, 25)
train(
    f"fit {shared} --data.files regenerated.jsonl --data.max_length 128 --data.widths 128 --data.tokens 1024 "
    f"--objective.anchors 16 --run.steps {steps} --run.evaluate_every {often} --run.log_every {often // 2 or 1} "
    f"--run.checkpoint_every {steps} --run.evaluate_conversations 24"
)

# %%
lines = records.read(Path("run/metrics.jsonl"))
evaluations = [line for line in lines if line["kind"] == records.EVALUATION]
training = [line for line in lines if line["kind"] == records.TRAIN]


def curve(axes, lines, name, label, style):
    axes.plot([line["step"] for line in lines], [line[name] for line in lines], style, label=label)


figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
curve(axes[0], training, "loss", "training", "-")
curve(axes[0], evaluations, "loss", "held out", "o-")
axes[0].set(xlabel="step", ylabel="loss (nats)")
curve(axes[1], evaluations, "tau_uniform", "uniform anchors", "o-")
curve(axes[1], evaluations, "walk", "walk (as decoding goes)", "s-")
axes[1].axhline(1, color="0.6", ls=":", label="no draft")
axes[1].set(xlabel="step", ylabel="tau, held out (tokens per round)", ylim=(0, None))
for line in evaluations[:: max(1, len(evaluations) // 4)]:
    axes[2].plot(range(1, 8), line["accuracy"], "o-", label=f"step {line['step']}")
axes[2].set(xlabel="slot of the block", ylabel="accuracy, held out", ylim=(0, 1))
for panel in axes:
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=8)
plt.show()
print("walk:", ", ".join(f"{line['walk']:.2f}" for line in evaluations))
assert SMALL or evaluations[-1]["walk"] > evaluations[0]["walk"] > 1

# %% [markdown]
# Uniform anchors flatter: a long accepted stretch holds many anchors, but decoding enters it once. The walk
# starts at the beginning of an answer and jumps by what was accepted, and the checkpoint with the best walk
# becomes `run/draft`.
#
# ## In the decoder
#
# The only tau that counts: prompts that were not trained on, the target deciding every token. An untrained
# draft of the same shape beside it. Both give the tokens of autoregressive decoding: a draft changes speed,
# never text.

# %%
learned = pair.load("run/target", "run/draft")
untrained = learned.with_draft(pair.random_draft(learned.target, num_layers=learned.draft.config.num_layers))
words = learned.target.tokenizer
unseen = [question for question in questions(seed=11) if question not in asked][:16]
prompts = [words.chat([{"role": "user", "content": question}]) for question in unseen]


def answer(models, options):
    return decode.complete(models, prompts, options, max_new_tokens=48, stop_ids=learned.target.stop_ids)


alone = answer(learned.models.without_draft(), AUTOREGRESSIVE)
warnings.simplefilter("ignore", DraftWarning)  # that a draft never helps: the untrained one
pairs = {"untrained": untrained, "trained": learned}
found = {name: answer(loaded.models, Options(Fixed(8))) for name, loaded in pairs.items()}
for name, done in found.items():
    assert done.tokens == alone.tokens  # lossless, whatever the draft
    kept = ", ".join(f"{share:.2f}" for share in done.acceptance_by_position())
    print(f"{name:10} tau {done.tau:.2f}; candidate 1 to 7 kept in these shares of rounds: {kept}")
assert SMALL or found["trained"].tau > found["untrained"].tau

# %% [markdown]
# That is more than the walk foretold: these questions are mostly about counting, the kind with most
# variants (few of the others were left), and these answers are greedy, while the held-out ones were drawn
# at a temperature of 0.2.
#
# Where rounds end, in four of these answers: each piece between two bars came out of one round. Rounds are
# short where the target decides (which number it begins with) and long where the rest follows.

# %%
done = found["trained"]
for row in range(4):
    ends = np.cumsum([1, *done.committed[row]])  # the first token is the prefill's
    tokens = done.tokens[row]
    pieces = [words.decode(tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    print("|".join(pieces))
