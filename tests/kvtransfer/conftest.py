import pytest

from kvtransfer.kv_channel import KvListener


@pytest.fixture
def listener():
    made = KvListener("127.0.0.1", 0)
    yield made
    made.close()
