package disk

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// queue performs the reads and writes of one directory by Linux AIO (io_submit(2)), so that they
// hold no thread: a thread that waits in pread also holds one of Go's processors until Go's monitor
// takes it away.
//
//	reader, writer ── io_submit ──▶ kernel ── eventfd, Go's poller ──▶ reap ── io_getevents ──┐
//	     its place ◀───────────────────────────────────────────────────────────────────────────┘
//
// Each reader and writer has a place of its own, so there is always room, and waits until the
// kernel is done with its memory.
type queue struct {
	context uintptr // of io_setup; 0: none, reads wait in threads
	event   *os.File
	eventFD int // of event; File.Fd would make it block
	places  []waiting
	reaper  sync.WaitGroup
	faults  faults
	path    string // of the directory, for faults
}

// waiting is the place of a reader or a writer.
type waiting struct {
	control iocb
	list    [1]*iocb   // argument of io_submit
	result  chan int64 // bytes read or written, or -errno
}

// ErrThreads is wrapped by the reason passed to OnState, with an unchanged state, for a directory
// whose reads and writes each hold a thread.
var ErrThreads = errors.New("the kernel has no asynchronous reads and writes for it, each holds a thread")

// iocb is struct iocb of linux/aio_abi.h, and ioEvent its struct io_event.
type iocb struct {
	data    uint64 // returned with the event
	_       uint64 // key and rw_flags
	command command
	_       int16 // reqprio
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

// command is an opcode of an iocb.
type command uint16

const (
	commandRead  command = 0 // IOCB_CMD_PREAD
	commandWrite command = 1 // IOCB_CMD_PWRITE
)

// openQueue makes a queue for so many readers and writers. With an error it returns one that uses
// threads.
func openQueue(path string, places int, f faults) (*queue, error) {
	q := &queue{places: make([]waiting, places), faults: f, path: path}
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
		return errors.Join(
			fmt.Errorf("io_setup: %w (fs.aio-max-nr is for all processes together)", err), unix.Close(fd),
		)
	}
	if _, err := q.take(make([]ioEvent, 1)); err != nil { // a kernel may allow one call and not the other
		return errors.Join(fmt.Errorf("io_getevents: %w", err), q.destroy(), unix.Close(fd))
	}
	q.eventFD, q.event = fd, os.NewFile(uintptr(fd), "queue of "+q.path)
	return nil
}

func (q *queue) destroy() error {
	_, err := system(
		func() (uintptr, uintptr, unix.Errno) { return unix.Syscall(unix.SYS_IO_DESTROY, q.context, 0, 0) },
	)
	q.context = 0
	return err
}

// system calls the kernel, and retries after a signal.
func system(call func() (n, _ uintptr, errno unix.Errno)) (int, error) {
	return retry(func() (int, error) {
		n, _, errno := call()
		if errno != 0 {
			return 0, errno
		}
		return int(n), nil
	})
}

// close ends the reaper, if the queue was made. No read or write may be running.
func (q *queue) close() error {
	if q == nil || q.context == 0 {
		return nil
	}
	err := q.event.Close()
	q.reaper.Wait()
	return errors.Join(err, q.destroy())
}

// io returns the ioFunc of place i for a command. Its memory must be off the Go heap. inThread is
// called, and a thread used, for what the queue does not take and for the page cache, which has no
// asynchronous reads.
func (q *queue) io(i int, c command, inThread func()) ioFunc {
	w, thread := &q.places[i], pread
	if c == commandWrite {
		thread = pwrite
	}
	return func(f *file, p []byte, off int64) (int, error) {
		if q.context == 0 || !f.direct || q.submit(w, iocb{data: uint64(i), command: c}, f, p, off) != nil {
			inThread()
			return thread(f, p, off)
		}
		n := <-w.result
		if n < 0 {
			return 0, unix.Errno(-n)
		}
		return int(n), nil
	}
}

func (q *queue) submit(w *waiting, c iocb, f *file, p []byte, off int64) error {
	if _, err := q.faults.meet(opSubmit, f.path, off, p); err != nil {
		return err
	}
	c.fd, c.buf = uint32(f.fd), uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p))))
	c.bytes, c.off = uint64(len(p)), off
	c.flags, c.eventFD = iocbEventFD, uint32(q.eventFD)
	w.control = c
	_, err := system(func() (uintptr, uintptr, unix.Errno) {
		return unix.Syscall(unix.SYS_IO_SUBMIT, q.context, uintptr(len(w.list)), uintptr(unsafe.Pointer(&w.list)))
	})
	return err
}

// reap passes results to their places until the queue is closed.
func (q *queue) reap() {
	var count [8]byte // number of completed reads, not needed
	events := make([]ioEvent, len(q.places))
	for {
		if _, err := q.event.Read(count[:]); err != nil {
			return
		}
		_, _ = q.faults.meet(opReap, q.path, 0, nil) // may only wait
		n, err := q.take(events)
		if err != nil {
			// The call was allowed when the queue was made, with the same arguments.
			panic("disk: io_getevents: " + err.Error())
		}
		for _, e := range events[:n] {
			q.places[e.data].result <- e.res
		}
	}
}

// take returns the results that are there without waiting: all of them, if events has room for one
// per place.
func (q *queue) take(events []ioEvent) (int, error) {
	var now unix.Timespec
	return system(func() (uintptr, uintptr, unix.Errno) {
		return unix.Syscall6(unix.SYS_IO_GETEVENTS, q.context, 0, uintptr(len(events)),
			uintptr(unsafe.Pointer(unsafe.SliceData(events))),
			uintptr(unsafe.Pointer(&now)), 0)
	})
}
