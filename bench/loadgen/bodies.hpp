// JSON bodies of the requests of all three services.
#pragma once

#include <string>

#include "dataset.hpp"

namespace kvbench {

// Renders request bodies for one model.
class Bodies {
 public:
  explicit Bodies(const Options& options)
      : model_(options.text("model")), separator_(options.integer("spaces", 0) ? ", " : ",") {}

  std::string query(const Tokens& tokens) const {
    return "{\"token_ids\":" + array(tokens) + "," + model_member() + "}";
  }

  std::string query_by_hash(const Hashes& hashes) const {
    return "{\"block_hashes\":" + hash_array(hashes) + "," + model_member() + "}";
  }

  std::string query_tiered_by_hash(const Hashes& hashes) const {
    return "{\"block_hashes\":" + hash_array(hashes) + "," + model_member() +
           ",\"routing_group\":\"default\"}";
  }

  std::string registration(long instance, const std::string& endpoint, long block_size) const {
    return "{\"instance_id\":" + std::to_string(instance) + ",\"endpoint\":\"" + endpoint +
           "\",\"block_size\":" + std::to_string(block_size) + "," + model_member() + "}";
  }

  // A worker of the slot tracker, with one rank.
  std::string slot_worker(long worker, long block_size) const {
    return "{\"worker_id\":" + std::to_string(worker) +
           ",\"block_size\":" + std::to_string(block_size) + ",\"dp_start\":0,\"dp_size\":1," +
           model_member() + "}";
  }

  std::string booking(const std::string& id, long worker, const Hashes& hashes,
                      long new_tokens) const {
    return "{" + model_member() + ",\"request_id\":\"" + id +
           "\",\"worker_id\":" + std::to_string(worker) +
           ",\"dp_rank\":0,\"sequence_hashes\":" + hash_array(hashes) +
           ",\"new_isl_tokens\":" + std::to_string(new_tokens) + "}";
  }

  // The body of /prefill_complete and /free.
  std::string slot_step(const std::string& id) const {
    return "{" + model_member() + ",\"request_id\":\"" + id + "\"}";
  }

  std::string projection(const Hashes& hashes, long new_tokens) const {
    return "{" + model_member() + ",\"sequence_hashes\":" + hash_array(hashes) +
           ",\"new_isl_tokens\":" + std::to_string(new_tokens) + "}";
  }

  // A worker of the selection service, with one rank.
  std::string catalog_worker(long worker, const std::string& endpoint, long block_size) const {
    const std::string id = std::to_string(worker);
    return "{" + model_member() + ",\"worker_id\":" + id + ",\"endpoint\":\"http://worker-" + id +
           ":8000\",\"block_size\":" + std::to_string(block_size) + ",\"kv_events_endpoint\":\"" +
           endpoint + "\"}";
  }

  std::string select(const Tokens& tokens, size_t block_size) const {
    return "{" + hash_members(tokens, block_size) + "," + model_member() + "}";
  }

  // Each service reads one of the two names of the reservation's id, and ignores the other.
  std::string reserve(const std::string& id, const Tokens& tokens, size_t block_size) const {
    return "{" + model_member() + ",\"reservation_id\":\"" + id + "\",\"selection_id\":\"" + id +
           "\"," + hash_members(tokens, block_size) + "}";
  }

 private:
  std::string hash_members(const Tokens& tokens, size_t block_size) const {
    return "\"block_hashes\":" + hash_array(local_hashes(tokens, block_size)) +
           ",\"sequence_hashes\":" + hash_array(sequence_hashes(tokens, block_size, nullptr)) +
           ",\"isl_tokens\":" + std::to_string(tokens.size());
  }

  // Hashes are sent as signed numbers, since the peer reads only i64.
  std::string hash_array(const Hashes& hashes) const {
    return array(std::vector<int64_t>(hashes.begin(), hashes.end()));
  }

  template <class Numbers>
  std::string array(const Numbers& numbers) const {
    std::string text = "[";
    for (size_t i = 0; i < numbers.size(); i++) {
      if (i) text += separator_;
      text += std::to_string(numbers[i]);
    }
    return text + "]";
  }

  std::string model_member() const { return "\"model_name\":\"" + model_ + "\""; }

  std::string model_, separator_;
};

}  // namespace kvbench
