import pytest
@pytest.fixture
def backend_name(): return "host"
