// JSON bodies of the indexer's requests.
#pragma once

#include <string>

#include "dataset.hpp"

namespace kvbench {

// Renders request bodies for one model.
class Bodies {
public:
    explicit Bodies(const Options& options)
        : model_(options.text("model")),
          separator_(options.integer("spaces", 0) ? ", " : ",") {}

    std::string query(const Tokens& tokens) const {
        return "{\"token_ids\":" + array(tokens) + "," + model_member() + "}";
    }

    // Hashes go out as signed numbers: the peer reads i64 only.
    std::string query_by_hash(const Hashes& hashes) const {
        return "{\"block_hashes\":" + array(std::vector<int64_t>(hashes.begin(), hashes.end())) +
               "," + model_member() + "}";
    }

    std::string registration(long instance, const std::string& endpoint, long block_size) const {
        return "{\"instance_id\":" + std::to_string(instance) + ",\"endpoint\":\"" + endpoint +
               "\",\"block_size\":" + std::to_string(block_size) + "," + model_member() + "}";
    }

private:
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
