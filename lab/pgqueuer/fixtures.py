

# Freestone: a PostgreSQL server for each test, on a fork of a disk with the schema.
@pytest.fixture(scope="session")
def freestone_postgres_setup():
    async def install(url):
        conn = await asyncpg.connect(url)
        await Queries(AsyncpgDriver(conn)).install()
        await conn.close()

    return lambda server: asyncio.run(install(server.url))


@pytest.fixture
def dsn(freestone_postgres):
    return freestone_postgres.url
