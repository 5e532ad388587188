"""Two small trained models, so that later tests have real weights, real routing skew and real drafts.

`ced/` is a DeepSeek-V4.1-form model with every part on, `v3/` a DeepSeek-V3-form one for Transformers. Both were
trained on the sources of Python's standard library, which every machine has, by the scripts beside them:

    python -m tests.trained.data                  # once, on a CPU, 10 s: split, tokenizer, tokens in .data/ (20 MB)
    python -m tests.trained.train ced             # one GPU, 6 minutes: weights, loss curves, commands, metrics
    python -m tests.trained.train v3              # one GPU, 3 minutes
    python -m tests.trained.evaluate ced v3       # bits a byte, drafts accepted a step, calibration, router load

Each folder holds config.json, tokenizer.json, model.safetensors, loss.csv (and loss_draft.csv), commands.txt and
metrics.json. `ced_model.load` and `v3_model.load` open them; the first's main part is the package's own model, the
second's is Transformers'. Files are split by a hash of their names (`data`), so that held-out files are the same with
every Python version; `data.of_kind(data.sources(), "held")` gives them.

`ced_forward`, `ced_draft` and `v3_forward` compute what the models themselves compute, in a form that trains fast: no
loops over experts, no size that depends on data, nothing read back from the device. Tests hold them to the models.
"""
