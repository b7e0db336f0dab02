# The commands of the README and of .ci/run under short names. PYTEST_ARGS="-n 2 -k tree" narrows or widens.

.PHONY: check lint test parity slow format docs

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

docs:
	mkdocs build --strict  # into site/, to be opened from there

format:
	ruff check --fix .
	ruff format .
