package mover

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/host"
)

// socketFD is the mover's end of the socket pair, as it is started.
const socketFD = 3

// endWait is how long a mover without an agent may take to end its copies and close its regions.
// After that it exits, and the kernel closes them.
const endWait = 2 * time.Second

// Run serves the agent over descriptor 3 until the agent closes its end or dies. Mover starts the
// process. An error is for the process's standard error; the process is to end in any case.
//
// The end of the socket and the parent-death signal show the agent's death. That signal is not
// SIGKILL: the kernel would close a proof (Import.Proof) before the driver has stopped its
// engines. SIGCONT wakes a mover that was stopped. Signals of a terminal or of a service manager do
// not end a mover, so that a draining agent can go on.
func Run(open OpenDevice) error {
	unix.CloseOnExec(socketFD)
	if err := closeInherited(); err != nil {
		return err
	}
	conn, err := newConn(socketFD)
	if err != nil {
		return fmt.Errorf("%w (a mover is started by an agent, not by hand)", err)
	}
	defer conn.close()
	// While memory is collected, copies are neither begun nor ended. There is little of it: this
	// lets it reach some 40 MiB.
	debug.SetGCPercent(900)
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	deaths := make(chan os.Signal, 1)
	signal.Notify(deaths, unix.SIGCONT)
	parent, ended := os.Getppid(), make(chan struct{})
	defer close(ended)
	go watchParent(parent, deaths, ended, conn)
	return serve(conn, open, func() { time.AfterFunc(endWait, func() { os.Exit(1) }) })
}

// watchParent ends the connection at the parent-death signal, SIGCONT; others are ignored.
func watchParent(parent int, deaths <-chan os.Signal, ended <-chan struct{}, conn *conn) {
	for {
		select {
		case <-deaths:
			if os.Getppid() != parent {
				_ = conn.conn.SetReadDeadline(time.Unix(1, 0)) // fails only when the connection has ended
			}
		case <-ended:
			return
		}
	}
}

// closeInherited closes every descriptor above the standard ones that exec left open. None of
// this process's own is open yet.
func closeInherited() error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= socketFD {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
	return nil
}

// Open opens, in a mover, the devices of this package by their names.
func Open(s Setup) (cudaipc.Device, error) {
	switch s.Device {
	case cudaipc.CUDAProbe:
		if err := cuda.SeeGPUs(); err != nil {
			return nil, err
		}
		fallthrough
	case cudaipc.HostDevice:
		return host.Open(host.Options{
			ArenaFD:   s.ArenaFD,
			ArenaSize: s.ArenaSize,
		})
	case cudaipc.CUDADevice:
		d, err := cuda.Open(cuda.Options{GPU: s.GPU, ArenaFD: s.ArenaFD, ArenaSize: s.ArenaSize})
		if err != nil {
			return nil, err // not d, which would be an interface that is not nil
		}
		return d, nil
	}
	return nil, fmt.Errorf("device %q, allowed: %s, %s: %w", s.Device, cudaipc.HostDevice, cudaipc.CUDADevice,
		cudaipc.ErrKind)
}

// deviceInfo returns the state of a device as JSON, or nothing if it has none.
func deviceInfo(d cudaipc.Device) []byte {
	c, ok := d.(interface{ Info() cudaipc.CUDAInfo })
	if !ok {
		return nil
	}
	text, err := json.Marshal(c.Info())
	if err != nil {
		return nil // it has texts and numbers only
	}
	return text
}
