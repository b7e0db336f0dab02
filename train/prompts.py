"""Beginnings of user turns, of the kinds that people type: the target continues them in its own words.

A prompt sampled from the target's bare prior is mostly chit-chat; these lead it to code, arithmetic,
lists, rewriting and plain questions too. Written for this project: no benchmark's prompt is among them.
"""

from __future__ import annotations

BEGINNINGS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that", "Write a function to", "Write a Python program to",
        "Write a Python function called", "Complete the following Python function:\n```python\ndef ",
        "def ", "```python\ndef ", "How do I", "Fix the bug in this code:\n", "What does this code do?\n",
        "Write a SQL query that", "Write a JavaScript function", "Write a class in Python", "Implement a",
        "Write a unit test for", "Write a bash script", "In Python, how can I", "Explain this code:\n",
        "Write a regular expression", "Write an HTML page", "Write a python function to find the",
        "Write a Python script that reads", "Please write a recursive function", "import ", "Convert this",
        "Write a program that prints", "Given a list of integers,", "Given a string,",
        "from typing import List\n\n\ndef ",
    ),
    "mathematics": (
        "Solve", "A train", "If", "What is", "Calculate", "Tom has", "A farmer", "There are", "A store sells",
        "Sarah bought", "How many", "The sum of", "Find the value of", "A rectangle has", "John is", "Maria",
        "A car travels", "What is the area of", "Simplify", "Convert", "In a class of", "A baker", "Each",
        "A shop", "Half of", "Three friends", "A bus", "Every day,", "Lisa earns", "A box contains",
        "The price of", "It takes", "Ben and", "A school", "Emma is reading a book with",
    ),
    "lists": (
        "List", "Give me", "Name", "What are the", "Make a list of", "Provide", "Suggest", "Give three",
        "Create a table", "Write a shopping list", "List five", "What are some", "Outline", "Plan",
        "Create a schedule", "Write a step-by-step", "Give me a recipe", "Recommend", "Brainstorm",
    ),
    "rewriting": (
        "Rewrite", "Summarize", "Translate", "Edit", "Paraphrase", "Correct the grammar", "Make this",
        "Summarize the following text:\n", "Rewrite this sentence", "Shorten", "Proofread",
        "Extract the", "Classify", "Here is an email:\n", "Turn the following", "Improve", "Continue",
    ),
    "questions": (
        "Explain", "Why", "What", "How does", "How", "Who", "When did", "Describe", "Tell me about",
        "What is the difference between", "Can you", "Compare", "Define", "Is it", "What happens if",
        "Why is the sky", "Where", "Which", "Should I", "Do you", "Explain how", "In simple terms,",
        "What is the capital of", "Discuss", "What do you think about", "Tell me", "Help me", "I",
    ),
    "writing": (
        "Write a story", "Write a poem", "Write an email", "Write a letter", "Write a short", "Compose",
        "Draft", "Write a blog post", "Create a", "Imagine", "You are", "Write a paragraph", "Write",
        "Write a dialogue", "Write an essay", "Design", "Describe a", "Pretend", "Act as", "Hello", "Hi",
        "Write a product description", "Once upon a time", "Generate", "Write a review", "Let's",
    ),
}  # fmt: skip
