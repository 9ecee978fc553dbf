import com.sun.jna.Library;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.io.IOException;

/** A disk of a Freestone server, by libnbd. */
final class Disk implements AutoCloseable {
    /** The functions of libnbd that this class uses. size_t is 64 bits wide. */
    private interface Nbd extends Library {
        Nbd LIBRARY = Native.load("libnbd.so.0", Nbd.class);

        Pointer nbd_create();

        int nbd_connect_uri(Pointer handle, String uri);

        int nbd_pread(Pointer handle, byte[] buffer, long count, long offset, int flags);

        int nbd_pwrite(Pointer handle, byte[] buffer, long count, long offset, int flags);

        int nbd_shutdown(Pointer handle, int flags);

        void nbd_close(Pointer handle);

        String nbd_get_error();
    }

    private final Pointer handle;

    /** Connects to the disk at an NBD URI. */
    Disk(String uri) throws IOException {
        handle = Nbd.LIBRARY.nbd_create();
        if (handle == null) {
            throw new IOException(Nbd.LIBRARY.nbd_get_error());
        }
        try {
            check(Nbd.LIBRARY.nbd_connect_uri(handle, uri));
        } catch (IOException error) {
            Nbd.LIBRARY.nbd_close(handle);
            throw error;
        }
    }

    byte[] read(long offset, int length) throws IOException {
        byte[] buffer = new byte[length];
        check(Nbd.LIBRARY.nbd_pread(handle, buffer, length, offset, 0));
        return buffer;
    }

    void write(long offset, byte[] data) throws IOException {
        check(Nbd.LIBRARY.nbd_pwrite(handle, data, data.length, offset, 0));
    }

    @Override
    public void close() throws IOException {
        try {
            check(Nbd.LIBRARY.nbd_shutdown(handle, 0));
        } finally {
            Nbd.LIBRARY.nbd_close(handle);
        }
    }

    private static void check(int result) throws IOException {
        if (result == -1) {
            throw new IOException(Nbd.LIBRARY.nbd_get_error());
        }
    }
}
