"""Names of Python code in the JSON files of a Hugging Face folder."""

import json

CODE_KEYS = ("auto_map", "custom_pipelines")  # they name classes in *.py files, which are neither run nor copied


def without_code(content: bytes) -> bytes:
    """Return a JSON file of a Hugging Face folder without the fields that name Python code.

    A file without such fields, or one that is not a JSON object, is returned unchanged.
    """
    if not any(key.encode() in content for key in CODE_KEYS):
        return content
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(fields, dict) or not any(key in fields for key in CODE_KEYS):
        return content
    kept = {key: value for key, value in fields.items() if key not in CODE_KEYS}
    return (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()
