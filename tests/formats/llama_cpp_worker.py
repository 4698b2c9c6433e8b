"""Runs llama.cpp in the Python that has it: `python llama_cpp_worker.py job.json result.json`.

The job has `model`, a GGUF file, `prompts` (lists of ids, or texts), `new` tokens to generate
greedily, and `vocab`. The result has for each prompt the text, the generated ids, and the
log-probabilities of the whole vocabulary at each.
"""

import json
import sys

import xllamacpp


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_ctx = 512
    params.n_gpu_layers = 0
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    results = []
    for prompt in job["prompts"]:
        request = {
            "prompt": prompt,
            "max_tokens": job["new"],
            "logprobs": job["vocab"],
            "temperature": 0.0,
            "cache_prompt": False,
        }
        (choice,) = server.handle_completions(request)["choices"]
        steps = choice["logprobs"]["content"]
        rows = []
        for step in steps:
            row = [0.0] * job["vocab"]
            for entry in step["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
            rows.append(row)
        ids = [step["id"] for step in steps]
        results.append({"text": choice["text"], "ids": ids, "logprobs": rows})
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
