package mover

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// socketFD is the mover's end of the socket pair, as it is started.
const socketFD = 3

// witnessEnv is set in a process that a mover starts to measure its GPU.
const witnessEnv = "KVAGENT_MOVER_WITNESS"

// endWait is how long a mover whose agent is gone may take to end its copies and to close its regions; then the kernel
// closes them.
const endWait = 2 * time.Second

// Run is the life of a mover process, which Mover starts: it serves the agent over descriptor 3 until the agent closes
// its end or dies. An error is for the process's standard error; the process is to end in any case.
//
// The agent's death is seen by the end of the socket and by the parent-death signal. That signal is not SIGKILL: the
// kernel would close a proof (Import.Proof) before the driver has stopped its engines. Signals of a terminal or of a service manager
// do not end a mover, so that an agent that drains can do so.
func Run(open OpenDevice) error {
	unix.CloseOnExec(socketFD)
	if os.Getenv(witnessEnv) != "" {
		return runWitness()
	}
	if err := closeInherited(); err != nil {
		return err
	}
	conn, err := newConn(socketFD)
	if err != nil {
		return fmt.Errorf("%w (a mover is started by an agent, not by hand)", err)
	}
	defer conn.close()
	signal.Ignore(unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	terms := make(chan os.Signal, 1)
	signal.Notify(terms, unix.SIGTERM)
	parent, ended := os.Getppid(), make(chan struct{})
	defer close(ended)
	go watchParent(parent, terms, ended, conn)
	return serve(conn, open, func() { time.AfterFunc(endWait, func() { os.Exit(1) }) })
}

// watchParent ends the connection when the parent-death signal comes, which is SIGTERM; from anybody else it means nothing.
func watchParent(parent int, terms <-chan os.Signal, ended <-chan struct{}, conn *conn) {
	for {
		select {
		case <-terms:
			if os.Getppid() != parent {
				_ = conn.conn.SetReadDeadline(time.Unix(1, 0)) // fails only when the connection has ended
			}
		case <-ended:
			return
		}
	}
}

// closeInherited closes every descriptor above the standard ones that was open across exec, which is each that is not
// marked to be closed by it. None of this process's own is such a one yet.
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

// buildName names this process's binary: agent and mover are the same file.
func buildName() (string, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/exe", &st); err != nil {
		return "", fmt.Errorf("/proc/self/exe: %w", err)
	}
	return fmt.Sprintf("file %d:%d, %d bytes of %d.%09d", st.Dev, st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec), nil
}
