package bench

import (
	"os"
	"testing"
)

// asCommand makes the test binary the command itself.
const asCommand = "KVAGENT_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) == "" {
		os.Exit(m.Run())
	}
	root := Command()
	root.SetArgs(os.Args[2:]) // after bench
	if root.Execute() != nil {
		os.Exit(1)
	}
}
