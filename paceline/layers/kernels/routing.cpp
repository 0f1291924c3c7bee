// Expert routing.
#include "common.h"

// DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): sigmoid scores; the correction bias takes part in the choice alone; a group
// counts by its two best; the best experts of the best groups. The first of equals wins. Or the scores are a softmax of all
// logits: then experts are chosen by their logits, which differ where tiny scores no longer do.

static int64_t take_best(float* scores, int64_t n) {  // index of the largest, which is then struck out
  int64_t best = std::max_element(scores, scores + n) - scores;
  scores[best] = -INFINITY;
  return best;
}

static void route_row(const float* logits, int64_t E, const float* bias, int64_t groups, int64_t top_groups, int64_t k,
                      bool normalise, float factor, bool softmax, int64_t* ids, float* weights) {
  int64_t padded = (E + 15) / 16 * 16, size = E / groups;
  std::vector<float> score(padded, 0.0f), choice(E), worth(groups), left(size);
  std::copy(logits, logits + E, score.begin());
  if (softmax) {
    float high = *std::max_element(logits, logits + E), total = 0;
    for (int64_t e = 0; e < padded; e += 16) store16(&score[e], vexp(load16(&score[e]) - high));
    for (int64_t e = 0; e < E; e++) total += score[e];
    for (int64_t e = 0; e < E; e++) score[e] /= total;
  } else {
    for (int64_t e = 0; e < padded; e += 16) {
      v16 x = load16(&score[e]), t = vexp(x > 0.0f ? -x : x);
      store16(&score[e], x > 0.0f ? 1.0f / (1.0f + t) : t / (1.0f + t));
    }
  }
  for (int64_t e = 0; e < E; e++) choice[e] = softmax ? logits[e] : score[e] + (bias ? bias[e] : 0.0f);
  for (int64_t g = 0; g < groups; g++) {
    std::copy(&choice[g * size], &choice[g * size] + size, left.begin());
    float first = choice[g * size + take_best(left.data(), size)];
    worth[g] = first + choice[g * size + take_best(left.data(), size)];
  }
  std::vector<char> open(groups, 0);
  for (int64_t i = 0; i < top_groups; i++) open[take_best(worth.data(), groups)] = 1;
  for (int64_t e = 0; e < E; e++) if (!open[e / size]) choice[e] = -INFINITY;
  float sum = 0;
  for (int64_t i = 0; i < k; i++) {
    ids[i] = take_best(choice.data(), E);
    sum += weights[i] = score[ids[i]];
  }
  for (int64_t i = 0; i < k; i++) weights[i] = (normalise ? weights[i] / (sum + 1e-20f) : weights[i]) * factor;
}

extern "C" void pl_route(const float* logits, int64_t rows, int64_t E, const float* bias, int64_t groups,
                         int64_t top_groups, int64_t k, int normalise, float factor, int softmax, int64_t* ids,
                         float* weights) {
#pragma omp parallel for schedule(static) num_threads(pl_threads()) if (pl_threads() > 1 && rows > 16)
  for (int64_t r = 0; r < rows; r++)
    route_row(logits + r * E, E, bias, groups, top_groups, k, normalise, factor, softmax, ids + r * k, weights + r * k);
}
