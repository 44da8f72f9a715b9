package disk

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// queue carries the reads of one directory by Linux AIO (io_submit(2)), so that none holds a thread: a thread that waits in pread holds one of Go's
// processors as well, until Go's monitor sees it and takes it away.
//
//	reader ── io_submit ──▶ kernel ── eventfd, Go's poller ──▶ reap ── io_getevents ──▶ the reader's place
//
// Each reader has a place of its own, so there is always room. The memory of a read is the reader's, which waits until the kernel is done with it.
type queue struct {
	context uintptr // of io_setup; 0: there is none, and reads wait in threads
	event   *os.File
	eventFD int // of event; File.Fd would make it block
	places  []waiting
	reaper  sync.WaitGroup
	faults  faults
	path    string // of the directory, for faults
}

// waiting is a reader's place.
type waiting struct {
	control iocb
	list    [1]*iocb   // what io_submit takes
	result  chan int64 // bytes read, or -errno
}

// ErrThreads is wrapped by the reason OnState is given, with the state as it is, for a directory whose reads each hold a thread.
var ErrThreads = errors.New("the kernel gives no asynchronous reads, each holds a thread")

// iocb is struct iocb of linux/aio_abi.h, and ioEvent its struct io_event.
type iocb struct {
	data    uint64 // comes back with the event
	_       uint64 // key and rw_flags
	_       uint16 // opcode: 0 is IOCB_CMD_PREAD
	_       int16  // reqprio
	fd      uint32
	buf     uint64
	bytes   uint64
	off     int64
	_       uint64
	flags   uint32
	eventFD uint32
}

type ioEvent struct {
	data uint64
	_    uint64 // the iocb
	res  int64  // bytes, or -errno
	_    int64
}

const iocbEventFD = 1 // IOCB_FLAG_RESFD

// openQueue makes a queue for so many readers. With an error it is one in which reads wait in threads.
func openQueue(path string, readers int, f faults) (*queue, error) {
	q := &queue{places: make([]waiting, readers), faults: f, path: path}
	for i := range q.places {
		w := &q.places[i]
		w.list[0], w.result = &w.control, make(chan int64, 1)
	}
	if err := q.setUp(); err != nil {
		return q, fmt.Errorf("%w: %w", ErrThreads, err)
	}
	q.reaper.Go(q.reap)
	return q, nil
}

func (q *queue) setUp() error {
	if _, err := q.faults.meet(opQueue, q.path, 0, nil); err != nil {
		return fmt.Errorf("io_setup: %w", err)
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	_, err = system(func() (uintptr, uintptr, unix.Errno) {
		return unix.Syscall(unix.SYS_IO_SETUP, uintptr(len(q.places)), uintptr(unsafe.Pointer(&q.context)), 0)
	})
	if err != nil {
		return errors.Join(fmt.Errorf("io_setup: %w (fs.aio-max-nr is for the reads of all processes together)", err), unix.Close(fd))
	}
	if _, err := q.take(make([]ioEvent, 1)); err != nil { // a kernel that allows one call and not the other
		return errors.Join(fmt.Errorf("io_getevents: %w", err), q.destroy(), unix.Close(fd))
	}
	q.eventFD, q.event = fd, os.NewFile(uintptr(fd), "reads of "+q.path)
	return nil
}

func (q *queue) destroy() error {
	_, err := system(func() (uintptr, uintptr, unix.Errno) { return unix.Syscall(unix.SYS_IO_DESTROY, q.context, 0, 0) })
	q.context = 0
	return err
}

// system is a call of the kernel, again where a signal came between.
func system(call func() (n, _ uintptr, errno unix.Errno)) (int, error) {
	return retry(func() (int, error) {
		n, _, errno := call()
		if errno != 0 {
			return 0, errno
		}
		return int(n), nil
	})
}

// close ends the reaper. No reader may be reading. Nil: it was never made.
func (q *queue) close() error {
	if q == nil || q.context == 0 {
		return nil
	}
	err := q.event.Close()
	q.reaper.Wait()
	return errors.Join(err, q.destroy())
}

// reader is the way to read of reader number i. Its memory must not be the collector's. What the queue does not take, and what goes through the page
// cache, which has no asynchronous reads, waits in a thread.
func (q *queue) reader(i int, inThread func()) reading {
	w := &q.places[i]
	return func(f *file, p []byte, off int64) (int, error) {
		if q.context == 0 || !f.direct || q.submit(w, uint64(i), f, p, off) != nil {
			inThread()
			return pread(f, p, off)
		}
		n := <-w.result
		if n < 0 {
			return 0, unix.Errno(-n)
		}
		return int(n), nil
	}
}

func (q *queue) submit(w *waiting, i uint64, f *file, p []byte, off int64) error {
	if _, err := q.faults.meet(opSubmit, f.path, off, p); err != nil {
		return err
	}
	w.control = iocb{
		data: i, fd: uint32(f.fd), buf: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))), bytes: uint64(len(p)), off: off,
		flags: iocbEventFD, eventFD: uint32(q.eventFD),
	}
	_, err := system(func() (uintptr, uintptr, unix.Errno) {
		return unix.Syscall(unix.SYS_IO_SUBMIT, q.context, uintptr(len(w.list)), uintptr(unsafe.Pointer(&w.list)))
	})
	return err
}

// reap hands results to their readers until the queue is closed.
func (q *queue) reap() {
	var count [8]byte // of the reads that have ended, which is not needed
	events := make([]ioEvent, len(q.places))
	for {
		if _, err := q.event.Read(count[:]); err != nil {
			return
		}
		_, _ = q.faults.meet(opReap, q.path, 0, nil) // may only wait
		n, err := q.take(events)
		if err != nil {
			panic("disk: io_getevents: " + err.Error()) // it was allowed when the queue was made, and the arguments are the same
		}
		for _, e := range events[:n] {
			q.places[e.data].result <- e.res
		}
	}
}

// take gives the results that are there, and does not wait: all of them, where there is room for one from each place.
func (q *queue) take(events []ioEvent) (int, error) {
	var now unix.Timespec
	return system(func() (uintptr, uintptr, unix.Errno) {
		return unix.Syscall6(unix.SYS_IO_GETEVENTS, q.context, 0, uintptr(len(events)), uintptr(unsafe.Pointer(unsafe.SliceData(events))),
			uintptr(unsafe.Pointer(&now)), 0)
	})
}
