#include "program.h"

#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>

#include <filesystem>

#include "error.h"

namespace g4 {
namespace {

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::BackendOptions;
using executorch::runtime::EValue;
namespace runtime = executorch::runtime;

constexpr char kCuda[] = "CudaBackend";

// Without these the CUDA backend gives every method a key-value cache of its own.
void set_cuda_options(bool cuda_graph) {
  BackendOptions<2> options;
  options.set_option("weight_sharing_across_methods", true);
  if (cuda_graph) {
    options.set_option("enable_cuda_graph_for_method", "decode");
  }
  if (runtime::set_option(kCuda, options.view()) != runtime::Error::Ok) {
    throw Error("the CUDA backend of this executorch takes none of the options that a key-value "
                "cache needs: install the version that made the program.");
  }
}

}  // namespace

Program::Program(const std::string& folder, bool cuda_graph)
    : path_((std::filesystem::path(folder) / "model.pte").string()) {
  if (!std::filesystem::is_regular_file(path_)) {
    throw Error(folder + " has no model.pte: give the folder of an export.");
  }
  std::vector<std::string> data;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".ptd") {
      data.push_back(entry.path().string());
    }
  }
  // One arena for both methods: the key-value cache lies in it.
  module_ = std::make_unique<Module>(path_, data, Module::LoadMode::Mmap, nullptr, nullptr, nullptr,
                                     /*share_memory_arenas=*/true);
  if (module_->load() != runtime::Error::Ok) {
    throw Error(path_ + " is no program that this executorch reads: export the model again.");
  }
  max_seq_len = constant("max_seq_len");
  prefill_chunk = constant("prefill_chunk");
  vocab_size = constant("vocab_size");
  bos_id = constant("bos_id");
  samples = constant("sampling") != 0;
  eos_ids = constants("eos_ids");

  const auto meta = module_->method_meta("decode");
  const bool on_cuda = meta.ok() && meta->uses_backend(kCuda);
  if (cuda_graph && !on_cuda) {
    throw UsageError("--cuda-graph: " + path_ + " does not run on CUDA.");
  }
  if (on_cuda) {
    if (!runtime::get_backend_class(kCuda)) {
      throw Error(path_ + " needs CUDA, which the executorch that this runner was built with lacks: "
                          "build it against a CUDA wheel of executorch.");
    }
    set_cuda_options(cuda_graph);
  }
  for (const char* name : {"prefill", "decode"}) {
    if (module_->load_method(name) != runtime::Error::Ok) {
      throw Error(path_ + ": the method " + name + " cannot be loaded (damaged, or made for another "
                          "executorch or machine): export the model again.");
    }
  }
}

std::vector<int64_t> Program::constants(const std::string& name) {
  const auto result = module_->execute(name);
  if (!result.ok()) {
    throw Error(path_ + " has no constant " + name + ": it was not exported by g4.");
  }
  std::vector<int64_t> values;
  for (const EValue& value : *result) {
    if (value.isInt()) {
      values.push_back(value.toInt());
    } else if (value.isBool()) {
      values.push_back(value.toBool() ? 1 : 0);
    } else if (value.isTensor() && value.toTensor().scalar_type() == ScalarType::Long) {
      const auto& tensor = value.toTensor();
      const auto* data = tensor.const_data_ptr<int64_t>();
      values.insert(values.end(), data, data + tensor.numel());
    } else {
      throw Error(path_ + ": the constant " + name + " is not a whole number.");
    }
  }
  return values;
}

int64_t Program::constant(const std::string& name) {
  const auto values = constants(name);
  if (values.size() != 1) {
    throw Error(path_ + ": the constant " + name + " is not one number.");
  }
  return values[0];
}

void Program::run(const std::vector<int64_t>& ids, int64_t start, const Sampling& sampling,
                  Sampler& sampler) {
  const char* const method = ids.size() == 1 ? "decode" : "prefill";
  // The runtime only reads its inputs.
  auto* tokens = const_cast<int64_t*>(ids.data());
  const auto length = static_cast<executorch::aten::SizesType>(ids.size());
  const TensorPtr tokens_tensor = from_blob(tokens, {1, length}, ScalarType::Long);
  const TensorPtr start_tensor = from_blob(&start, {}, ScalarType::Long);
  std::vector<EValue> inputs{tokens_tensor, start_tensor};
  float temperature = sampling.temperature;
  int64_t top_k = sampling.top_k;
  float top_p = sampling.top_p;
  float uniform = samples ? sampler.uniform() : 0;
  const std::vector<TensorPtr> knobs{
      from_blob(&temperature, {}, ScalarType::Float), from_blob(&top_k, {}, ScalarType::Long),
      from_blob(&top_p, {}, ScalarType::Float), from_blob(&uniform, {}, ScalarType::Float)};
  if (samples) {
    inputs.insert(inputs.end(), knobs.begin(), knobs.end());
  }
  const auto result = module_->execute(method, inputs);
  if (!result.ok() || result->empty() || !result->front().isTensor()) {
    throw Error(path_ + ": " + method + " failed at position " + std::to_string(start) + ".");
  }
  const auto& output = result->front().toTensor();
  if (samples) {
    next_ = output.const_data_ptr<int64_t>()[0];
    return;
  }
  if (output.scalar_type() != ScalarType::Float || output.numel() != vocab_size) {
    throw Error(path_ + ": " + method + " gives no fp32 logits of the vocabulary: it was not "
                        "exported by g4.");
  }
  const auto* data = output.const_data_ptr<float>();
  logits_.assign(data, data + output.numel());
  next_ = sampler.choose(logits_);
}

}  // namespace g4
