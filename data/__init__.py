"""Conversations to token ids with loss masks, batches of them, and answers of the target to prompts.

May import `heads` and `decode`, never `train`. Import from the modules (`from data.conversations import ...`): this
file imports none of them, so that `python -m data.distill` and `python -m data.conversations` run cleanly.
"""
