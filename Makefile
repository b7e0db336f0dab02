# The commands of the README and of .ci/run under short names. PYTEST_ARGS="-n 2 -k tree" narrows or widens.

.PHONY: check lint test parity slow notebooks docs format

check: lint test

lint:
	ruff check .
	ruff format --check .
	mypy

test:
	pytest -n auto --dist loadfile $(PYTEST_ARGS)

parity:
	pytest -n auto --dist loadfile -m "(model or parity) and not slow" $(PYTEST_ARGS)

slow:
	pytest -m "slow or parity and slow" $(PYTEST_ARGS)  # naming parity enters tests/parity
	jupyter execute notebooks/*.ipynb

notebooks:  # what they show, written anew
	jupytext --quiet --to ipynb notebooks/*.py
	jupyter execute --inplace notebooks/*.ipynb

docs:
	mkdocs build --strict  # into site/, to be opened from there

format:
	ruff check --fix .
	ruff format .
