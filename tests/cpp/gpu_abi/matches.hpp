// Whether a function may be called through a pointer of ours.
#pragma once

#include <cstddef>
#include <type_traits>

template <class Ours, class Theirs>
constexpr bool passes_as = sizeof(Ours) == sizeof(Theirs) &&
                           (std::is_pointer_v<Ours> || std::is_integral_v<Ours>
                                ? std::is_pointer_v<Theirs> || std::is_integral_v<Theirs> || std::is_enum_v<Theirs>
                                : std::is_class_v<Ours> && std::is_class_v<Theirs>);

template <class Ours, class Theirs>
constexpr bool matches = false;

template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
constexpr bool matches<R (*)(A...), S (*)(B...)> = passes_as<R, S> && (passes_as<A, B> && ...);
