"""Drafts and texts as llama-speculative-simple prints them. (The program itself: `engine_drafts.py --to gguf`.)"""

import llama_cpp_drafts

LOG = """
0.01.56 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:     30 (   0.425) '
'
0.01.56 D spec        draft:  - seq_id 0, draft candidate   1, pos   0:     68 (   0.263) '.'
0.01.56 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:     31 (   0.131) '0'
30.01.61 D accepted 1/2 draft tokens, the last target token is: (35)
0.01.61 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:     40 (   0.379) '.'
0.01.61 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:     41 (   0.379) '.'
x0.01.66 D accepted 0/1 draft tokens, the last target token is: (2)
0.01.61 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:     50 (   0.379) '.'
0.01.66 D accepted 1/1 draft tokens, the last target token is: (3)
"""


def test_first_candidates_are_drafts_and_accepted_ones_the_text():
    text, steps = llama_cpp_drafts.read_steps(LOG, 10)
    assert text == [30, 35, 2, 50, 3]
    assert steps == [(0, [30, 31]), (2, [40, 41]), (3, [50])]


def test_what_is_behind_the_limit_is_dropped():
    text, steps = llama_cpp_drafts.read_steps(LOG, 3)
    assert text == [30, 35, 2]
    assert steps == [(0, [30, 31]), (2, [40, 41])]
