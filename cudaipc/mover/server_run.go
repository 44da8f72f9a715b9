package mover

import (
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
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

// Open opens, in a mover, the devices of this package by their names. The arena stays mapped until
// the process ends.
func Open(s Setup) (cudaipc.Device, error) {
	arena, err := cudaipc.MapFD(s.ArenaFD, s.ArenaSize)
	if err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	switch s.Device {
	case cudaipc.CUDAProbe:
		if err := cuda.SeeGPUs(); err != nil {
			return nil, err
		}
		fallthrough
	case cudaipc.HostDevice:
		return host.Open(arena), nil
	case cudaipc.CUDADevice:
		d, err := cuda.Open(cuda.Options{GPU: s.GPU, Arena: arena})
		if err != nil {
			return nil, err // not d, which would be an interface that is not nil
		}
		return d, nil
	}
	return nil, fmt.Errorf("device %q, allowed: %s, %s: %w", s.Device, cudaipc.HostDevice, cudaipc.CUDADevice,
		cudaipc.ErrKind)
}
