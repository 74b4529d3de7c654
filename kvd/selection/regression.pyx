# distutils: language = c++
"""Fits a line to observations by the method of Theil and Sen (kvd.selection.speeds).

Cost: some 10 µs for 48 observations, which have 1,128 pairs.
"""
from libcpp.algorithm cimport nth_element
from libcpp.vector cimport vector

cdef extern from "<cmath>" namespace "std" nogil:
    double fabs(double x)


cdef double median(vector[double]& values) noexcept nogil:
    """Returns the median of at least one value: the upper one of two in the middle."""
    cdef size_t middle = values.size() // 2
    nth_element(values.begin(), values.begin() + middle, values.end())
    return values[middle]


cdef bint is_one_length(const vector[double]& xs, double narrow):
    """Returns whether half of all x lie closer to their median than the share `narrow` of it."""
    cdef vector[double] values = xs
    cdef double middle = median(values)
    cdef size_t i
    for i in range(xs.size()):
        values[i] = fabs(xs[i] - middle)
    return median(values) < narrow * middle


cdef double median_ratio(const vector[double]& xs, const vector[double]& seconds):
    cdef vector[double] values
    cdef size_t i
    for i in range(xs.size()):
        values.push_back(seconds[i] / xs[i])
    return median(values)


def fit(points not None, double narrow):
    """Returns base and slope, neither negative, and the scatter: the median relative distance.

    points: (x, seconds), both positive. Where x hardly varies (`is_one_length`), the line goes
    through the origin. Returns None for fewer than two points, or if the time does not grow with x.
    """
    cdef vector[double] xs, seconds, values
    cdef double x, took, base = 0.0, slope
    cdef size_t i, j
    for x, took in points:
        xs.push_back(x)
        seconds.push_back(took)
    if xs.size() < 2:
        return None
    if is_one_length(xs, narrow):
        slope = median_ratio(xs, seconds)
    else:
        for i in range(xs.size()):
            for j in range(i):
                if xs[i] != xs[j]:
                    values.push_back((seconds[i] - seconds[j]) / (xs[i] - xs[j]))
        slope = median(values)
        if slope <= 0.0:
            return None
        values.clear()
        for i in range(xs.size()):
            values.push_back(seconds[i] - slope * xs[i])
        base = median(values)
        if base < 0.0:
            base, slope = 0.0, median_ratio(xs, seconds)
    values.clear()
    for i in range(xs.size()):
        values.push_back(fabs(seconds[i] - base - slope * xs[i]) / seconds[i])
    return base, slope, median(values)
