// Package disks opens disks of a Freestone server by libnbd (Debian's package libnbd-dev).
package disks

/*
#cgo pkg-config: libnbd
#include <stdlib.h>
#include <libnbd.h>
*/
import "C"

import (
	"errors"
	"unsafe"
)

// Disk is a connection to a disk. It implements io.ReaderAt and io.WriterAt.
type Disk struct {
	handle *C.struct_nbd_handle
}

// Open connects to the disk at an NBD URI.
func Open(uri string) (*Disk, error) {
	handle := C.nbd_create()
	if handle == nil {
		return nil, failure()
	}
	text := C.CString(uri)
	defer C.free(unsafe.Pointer(text))
	if C.nbd_connect_uri(handle, text) == -1 {
		err := failure()
		C.nbd_close(handle)
		return nil, err
	}
	return &Disk{handle}, nil
}

// Size returns the size of the disk in bytes.
func (disk *Disk) Size() int64 {
	return int64(C.nbd_get_size(disk.handle))
}

// ReadAt reads len(buffer) bytes.
func (disk *Disk) ReadAt(buffer []byte, offset int64) (int, error) {
	data := unsafe.Pointer(unsafe.SliceData(buffer))
	if C.nbd_pread(disk.handle, data, C.size_t(len(buffer)), C.uint64_t(offset), 0) == -1 {
		return 0, failure()
	}
	return len(buffer), nil
}

// WriteAt writes the buffer.
func (disk *Disk) WriteAt(buffer []byte, offset int64) (int, error) {
	data := unsafe.Pointer(unsafe.SliceData(buffer))
	if C.nbd_pwrite(disk.handle, data, C.size_t(len(buffer)), C.uint64_t(offset), 0) == -1 {
		return 0, failure()
	}
	return len(buffer), nil
}

// Close ends the connection.
func (disk *Disk) Close() error {
	defer C.nbd_close(disk.handle)
	if C.nbd_shutdown(disk.handle, 0) == -1 {
		return failure()
	}
	return nil
}

// failure returns libnbd's message. libnbd keeps the message of each thread, and a goroutine may change its thread
// between two calls, so the text can be missing.
func failure() error {
	if text := C.nbd_get_error(); text != nil {
		return errors.New(C.GoString(text))
	}
	return errors.New("libnbd failed")
}
