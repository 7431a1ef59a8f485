# make demo: train a small model on handwritten digits, evaluate it, predict.   make test: run the tests.
# Both make a virtual environment first, from nothing but Python.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= sgconvnext_atto
EPOCHS ?= 8
DEMO = output/demo

.PHONY: demo test lint sanitize clean

# with the workers that decode, more than one thread of OpenMP would fight for two cores
demo: export OMP_NUM_THREADS = 1
demo: $(VENV)/.installed-demo
	rm -rf $(DEMO)
	$(VENV)/bin/python train/digits.py $(DEMO)/digits
	$(VENV)/bin/python train/train.py $(DEMO)/digits --model $(MODEL) --img-size 32 --epochs $(EPOCHS) --batch-size 64 \
		--lr 2e-3 --hflip 0 --scale 0.6 1 --output $(DEMO)/run
	$(VENV)/bin/python eval/validate.py $(DEMO)/digits --split val --checkpoint $(DEMO)/run/best.pth
	$(VENV)/bin/python eval/predict.py $(DEMO)/digits/val/3/004.png $(DEMO)/digits/val/5/004.png \
		$(DEMO)/digits/val/8/004.png --checkpoint $(DEMO)/run/best.pth --topk 3

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.installed-test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

# the CPU kernel's C code: reads and writes beyond a buffer, undefined behaviour, races between threads
sanitize:
	mkdir -p build
	for kind in address,undefined thread; do \
		$(CC) -std=gnu11 -g -O1 -Wno-psabi -fsanitize=$$kind -fno-sanitize-recover=all tests/sanitize.c \
			models/gconvnext/layers/fft_conv*.c -lm -lpthread -o build/sanitize && build/sanitize && \
		GCONVNEXT_CPU=avx2 build/sanitize && GCONVNEXT_CPU=baseline build/sanitize || exit 1; \
	done

# installed once for each extra, and again when the dependencies change
$(VENV)/.installed-%: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) $(DEMO)
