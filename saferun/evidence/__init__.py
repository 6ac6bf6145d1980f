"""What is known of a hang or a failure, and the diagnosis: values that captures, hosts and reports share.

Values only, without clock or system. A launch imports them once its ranks run, not at its start.
"""
