#pragma once

#include <regex>
#include <string>
#include <vector>

namespace bagualu {

/// What makes a text ill-formed XML; "" if nothing does. Elements closed in order, attributes
/// quoted and without < or a bare &.
inline std::string fault_of(const std::string& html) {
  static const std::regex kMarkup(
      R"(<!DOCTYPE html>|<(/?)([a-zA-Z][a-zA-Z0-9]*)((?:\s+[a-zA-Z][a-zA-Z0-9:-]*="[^"<]*")*)\s*(/?)>|<|&)");
  static const std::regex kEntity(R"(^&(amp|lt|gt|quot|#39);)");
  std::vector<std::string> open;
  for (auto it = std::sregex_iterator(html.begin(), html.end(), kMarkup);
       it != std::sregex_iterator(); ++it) {
    const std::string near = html.substr(static_cast<size_t>(it->position()), 60);
    if (it->str() == "<!DOCTYPE html>") continue;
    if (it->str() == "&") {
      if (!std::regex_search(near, kEntity)) return "bare &: " + near;
    } else if (it->str() == "<") {
      return "no element: " + near;
    } else if ((*it)[1].length() > 0) {
      if (open.empty() || open.back() != (*it)[2].str()) return "closes what is not open: " + near;
      open.pop_back();
    } else if ((*it)[4].length() == 0) {
      open.push_back((*it)[2].str());
    }
  }
  return open.empty() ? "" : "left open: " + open.back();
}

/// What a page would fetch or run; "" if nothing.
inline std::string fetched_by(const std::string& html) {
  for (const char* word :
       {"<script", "<link", "<img", "src=", "href=", "url(", "@import", "<iframe"}) {
    if (html.find(word) != std::string::npos) return word;
  }
  const std::regex address(R"(https?://(?!www\.w3\.org/2000/svg))");
  std::smatch found;
  return std::regex_search(html, found, address) ? found.str() : "";
}

}  // namespace bagualu
