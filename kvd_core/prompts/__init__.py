"""Prompts that were seen before, so that their tokens need not be asked for again.

messages.hpp        the elements of a JSON array, found without reading what is in them
conversations       the blocks of conversations, by what their messages say, in bounded memory
"""
