"""Two small trained models, so that later tests have real weights, real routing skew and real drafts.

`ced/` is a DeepSeek-V4.1-form model with every part on, `v3/` a DeepSeek-V3-form one for Transformers. Both were
trained on the sources of Python's standard library, which every machine has, by the scripts beside them:

    python -m tests.trained.data                  # once, on a CPU: split, tokenizer, tokens in .data/
    python -m tests.trained.train ced v3          # on one GPU: weights, loss.csv, commands.txt, metrics.json
    python -m tests.trained.evaluate ced v3       # bits a byte, drafts accepted a step, calibration, router load

Files are split by a hash of their names (`data`), so that held-out files are the same with every Python version.
`ced_forward`, `ced_draft` and `v3_forward` compute what the models themselves compute, in a form that trains fast: no
loops over experts, no size that depends on data, nothing read back from the device. Tests hold them to the models.
"""
