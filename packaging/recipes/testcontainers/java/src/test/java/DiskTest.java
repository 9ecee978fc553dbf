import static java.nio.charset.StandardCharsets.UTF_8;
import static org.junit.jupiter.api.Assertions.assertEquals;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInfo;
import org.junit.jupiter.api.io.TempDir;
import org.testcontainers.containers.Container.ExecResult;
import org.testcontainers.containers.GenericContainer;
import org.testcontainers.containers.wait.strategy.Wait;
import org.testcontainers.utility.DockerImageName;
import org.testcontainers.utility.MountableFile;

/** Each test has a disk of its own: a fork of one image, in a container that all tests share. */
class DiskTest {
    private static final int NBD = 10809;
    private static final byte[] FIXTURE = "fixture".getBytes(UTF_8);
    private static final byte[] CHANGED = "changed".getBytes(UTF_8);

    private static GenericContainer<?> server;

    private String name;
    private Disk disk;

    @BeforeAll
    static void startServer(@TempDir Path directory) throws IOException {
        // Any raw image will do, such as one that mke2fs -d made.
        Path image = directory.resolve("golden.img");
        Files.write(image, Arrays.copyOf(FIXTURE, 16 << 20));
        String of = System.getenv().getOrDefault("FREESTONE_IMAGE", "freestone");
        server = new GenericContainer<>(DockerImageName.parse(of))
                .withCopyFileToContainer(MountableFile.forHostPath(image, 0644), "/images/golden.img")
                .withCommand(
                        "serve",
                        "golden=file,path=/images/golden.img,readonly=yes,mem_limit=256M",
                        "--nbd",
                        "tcp:0.0.0.0:" + NBD,
                        "--allow-plaintext")
                .withExposedPorts(NBD)
                .waitingFor(Wait.forSuccessfulCommand("freestone wait --timeout 5s"));
        server.start();
    }

    @AfterAll
    static void stopServer() {
        server.stop();
    }

    @BeforeEach
    void newDisk(TestInfo test) throws Exception {
        name = test.getTestMethod().orElseThrow().getName();
        freestone("fork", "golden", name, "--nbd", "tcp:0.0.0.0:" + NBD);
        disk = new Disk("nbd://" + server.getHost() + ":" + server.getMappedPort(NBD) + "/" + name);
    }

    @AfterEach
    void removeDisk() throws Exception {
        if (disk != null) {
            disk.close();
        }
        freestone("remove", "--force", name);
    }

    /** Runs a command of freestone in the container. */
    private static void freestone(String... arguments) throws Exception {
        String[] command = Stream.concat(Stream.of("freestone"), Stream.of(arguments)).toArray(String[]::new);
        ExecResult result = server.execInContainer(command);
        assertEquals(0, result.getExitCode(), () -> String.join(" ", command) + ": " + result.getStderr());
    }

    private void expect(byte[] content) throws IOException {
        assertEquals(new String(content, UTF_8), new String(disk.read(0, content.length), UTF_8));
    }

    @Test
    void writeStaysInTheTest() throws Exception {
        expect(FIXTURE);
        disk.write(0, CHANGED);
        expect(CHANGED);
    }

    @Test
    void nextTestFindsTheImage() throws Exception {
        expect(FIXTURE);
    }

    @Test
    void rewindInATest() throws Exception {
        disk.write(0, CHANGED);
        freestone("rewind", "--force", name);
        expect(FIXTURE);
    }
}
