package disks

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/exec"
	"github.com/testcontainers/testcontainers-go/wait"
)

// server is one container for all tests of the package.
var server *testcontainers.DockerContainer

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	directory, err := os.MkdirTemp("", "disks")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(directory)
	// Any raw image will do, such as one that mke2fs -d made.
	image := filepath.Join(directory, "golden.img")
	content := append([]byte("fixture"), make([]byte, 16<<20-len("fixture"))...)
	if err := os.WriteFile(image, content, 0o644); err != nil {
		panic(err)
	}
	name := os.Getenv("FREESTONE_IMAGE")
	if name == "" {
		name = "freestone"
	}
	server, err = testcontainers.Run(ctx, name,
		testcontainers.WithFiles(testcontainers.ContainerFile{
			HostFilePath: image, ContainerFilePath: "/images/golden.img", FileMode: 0o644,
		}),
		testcontainers.WithCmd("serve", "golden=file,path=/images/golden.img,readonly=yes,mem_limit=256M",
			"--nbd", "tcp:0.0.0.0:10809", "--allow-plaintext"),
		testcontainers.WithExposedPorts("10809/tcp"),
		testcontainers.WithWaitStrategy(wait.ForExec([]string{"freestone", "wait", "--timeout", "5s"})),
	)
	defer func() {
		if err := testcontainers.TerminateContainer(server); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	if err != nil {
		panic(err)
	}
	return m.Run()
}

// freestone runs a command of freestone in the container.
func freestone(t *testing.T, arguments ...string) {
	t.Helper()
	status, output, err := server.Exec(context.Background(), append([]string{"freestone"}, arguments...), exec.Multiplexed())
	if err != nil {
		t.Fatal(err)
	}
	if status != 0 {
		said, _ := io.ReadAll(output)
		t.Fatalf("freestone %v: status %d: %s", arguments, status, said)
	}
}

// newDisk returns a disk for one test: a fork of the image.
func newDisk(t *testing.T) *Disk {
	t.Helper()
	freestone(t, "fork", "golden", t.Name(), "--nbd", "tcp:0.0.0.0:10809")
	t.Cleanup(func() { freestone(t, "remove", "--force", t.Name()) })
	address, err := server.PortEndpoint(context.Background(), "10809/tcp", "nbd")
	if err != nil {
		t.Fatal(err)
	}
	disk, err := Open(address + "/" + t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { disk.Close() })
	return disk
}

// expect fails the test if the disk does not begin with a text.
func expect(t *testing.T, disk *Disk, text string) {
	t.Helper()
	found := make([]byte, len(text))
	if _, err := disk.ReadAt(found, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(found, []byte(text)) {
		t.Fatalf("the disk begins with %q, not %q", found, text)
	}
}

func TestWriteStaysInTheTest(t *testing.T) {
	disk := newDisk(t)
	expect(t, disk, "fixture")
	if _, err := disk.WriteAt([]byte("changed"), 0); err != nil {
		t.Fatal(err)
	}
	expect(t, disk, "changed")
}

func TestNextTestFindsTheImage(t *testing.T) {
	expect(t, newDisk(t), "fixture")
}

func TestRewindInATest(t *testing.T) {
	disk := newDisk(t)
	if _, err := disk.WriteAt([]byte("changed"), 0); err != nil {
		t.Fatal(err)
	}
	freestone(t, "rewind", "--force", t.Name())
	expect(t, disk, "fixture")
}
