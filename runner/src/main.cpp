#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "error.h"
#include "memory.h"
#include "program.h"
#include "sampler.h"
#include "tokenizer.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::ofstream open_output(const std::string& path) {
  std::ofstream file;
  if (!path.empty()) {
    file.open(path, std::ios::binary);
    if (!file) {
      throw g4::Error("cannot write " + path + ".");
    }
  }
  return file;
}

// Without white space at its ends, as the chat template takes a message.
std::string trimmed(const std::string& text) {
  constexpr char kWhite[] = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kWhite);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(kWhite) - begin + 1);
}

// The prompt as one turn of a chat; the export holds what its chat template puts around it.
std::vector<int64_t> turn_ids(const g4::Arguments& arguments, const g4::Tokenizer& tokenizer,
                              const std::string& prompt) {
  const std::string path = (std::filesystem::path(arguments.folder) / "export.json").string();
  try {
    std::ifstream file(path);
    const auto turn = nlohmann::json::parse(file).at("turn");
    return tokenizer.encode_turn(turn.at("before").get<std::string>(), trimmed(prompt),
                                 turn.at("after").get<std::string>());
  } catch (const nlohmann::json::exception&) {
    throw g4::Error(path + " has no chat turn (the model came without a chat template): use --raw.");
  }
}

// The prompt with what goes around it, without BOS where the template has none.
std::vector<int64_t> text_ids(const g4::Arguments& arguments, const g4::Tokenizer& tokenizer) {
  const std::string prompt = arguments.prompt
      ? *arguments.prompt
      : std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  return arguments.raw ? tokenizer.encode(prompt) : turn_ids(arguments, tokenizer, prompt);
}

std::vector<int64_t> prompt_ids(const g4::Arguments& arguments, const g4::Tokenizer& tokenizer,
                                const g4::Program& program) {
  auto ids = text_ids(arguments, tokenizer);
  if (ids.empty() || ids.front() != program.bos_id) {
    ids.insert(ids.begin(), program.bos_id);
  }
  const auto length = static_cast<int64_t>(ids.size());
  if (length >= program.max_seq_len) {
    throw g4::Error("the prompt has " + std::to_string(length) + " tokens and the program holds " +
                    std::to_string(program.max_seq_len) + " with the answer: shorten it, or export "
                    "with a larger --max-seq-len.");
  }
  return ids;
}

void run(const g4::Arguments& arguments) {
  g4::GpuMemory gpu;
  auto begin = Clock::now();
  const std::filesystem::path folder = arguments.folder;
  const g4::Tokenizer tokenizer((folder / "tokenizer.json").string());
  if (arguments.tokenize) {
    for (const int64_t id : text_ids(arguments, tokenizer)) {
      std::cout << id << '\n';
    }
    return;
  }
  g4::Program program(arguments.folder, arguments.cuda_graph);
  gpu.sample();
  const double load_seconds = seconds_since(begin);

  if (program.samples && !arguments.logits_file.empty()) {
    throw g4::UsageError("--logits: this program samples by itself and gives no logits.");
  }
  std::ofstream ids_file = open_output(arguments.ids_file);
  std::ofstream logits_file = open_output(arguments.logits_file);
  const auto ids = prompt_ids(arguments, tokenizer, program);
  const g4::Sampling sampling{arguments.temperature, arguments.top_k, arguments.top_p};
  g4::Sampler sampler(sampling.temperature, sampling.top_k, sampling.top_p, arguments.seed);
  const int64_t chunk = arguments.prefill_chunk ? std::min(arguments.prefill_chunk, program.prefill_chunk)
                                                : program.prefill_chunk;

  begin = Clock::now();
  const auto length = static_cast<int64_t>(ids.size());
  for (int64_t at = 0; at < length; at += chunk) {
    const auto end = ids.begin() + std::min(at + chunk, length);
    program.run({ids.begin() + at, end}, at, sampling, sampler);
    gpu.sample();
  }
  const double prefill_seconds = seconds_since(begin);

  begin = Clock::now();
  g4::TextStream text(tokenizer);
  const int64_t room = std::min(arguments.max_new_tokens, program.max_seq_len - length);
  int64_t made = 0;
  while (true) {
    const int64_t id = program.next();
    ++made;
    if (ids_file.is_open()) {
      ids_file << id << '\n';
    }
    if (logits_file.is_open()) {
      const auto& logits = program.logits();
      logits_file.write(reinterpret_cast<const char*>(logits.data()),
                        static_cast<std::streamsize>(logits.size() * sizeof(float)));
    }
    const auto& ends = program.eos_ids;
    const bool ended = std::find(ends.begin(), ends.end(), id) != ends.end();
    if (!ended) {
      std::cout << text.add(id) << std::flush;
    }
    if (ended || made == room) {
      break;
    }
    program.run({id}, length + made - 1, sampling, sampler);
    gpu.sample();
  }
  const double decode_seconds = seconds_since(begin);
  std::cout << text.finish() << std::endl;
  if (!std::cout || ids_file.fail() || logits_file.fail()) {
    throw g4::Error("the output could not be written.");
  }
  std::fprintf(stderr, "load %.2f s | prefill %lld tokens, %.1f tok/s | decode %lld tokens, %.1f tok/s\n",
               load_seconds, static_cast<long long>(length),
               static_cast<double>(length) / prefill_seconds, static_cast<long long>(made - 1),
               made > 1 ? static_cast<double>(made - 1) / decode_seconds : 0.0);
  std::fprintf(stderr, "Host peak memory usage: %lld MiB\n",
               static_cast<long long>(g4::host_peak_mib()));
  std::fprintf(stderr, "GPU peak memory usage: %lld MiB\n", static_cast<long long>(gpu.peak_mib()));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const g4::Arguments arguments = g4::parse_arguments(argc, argv);
    if (arguments.help) {
      std::cout << g4::kHelp;
    } else {
      run(arguments);
    }
  } catch (const g4::UsageError& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
