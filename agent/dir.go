package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvagent/kvagent/ipc"
)

// lockSuffix is what the name of a socket's lock has behind the socket's own.
const lockSuffix = ".lock"

// removeStale removes the sockets that a dead agent left in the directory: those with a lock that nobody holds. A lock
// without a socket is not looked at: others have files of such names too.
// The lock of admin.sock is held by this agent, so that no other one works here.
func removeStale(dir string, group int) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("socket-dir: %w", err)
	}
	for _, f := range files {
		name, isLock := strings.CutSuffix(f.Name(), lockSuffix)
		if !isLock || name == ipc.AdminSocket || !isSocket(filepath.Join(dir, name)) {
			continue
		}
		// Listening takes the lock and the dead socket's place, and closing removes both.
		l, err := ipc.ListenUnix(filepath.Join(dir, name), group)
		if errors.Is(err, ipc.ErrInUse) {
			return fmt.Errorf("socket-dir: %w", err)
		}
		if err != nil {
			continue // no socket of ours: whoever wants its name will hear of it
		}
		if err := l.Close(); err != nil {
			return fmt.Errorf("socket-dir: %w", err)
		}
	}
	return nil
}

func isSocket(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeSocket != 0
}
