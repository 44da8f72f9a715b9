// Command kvbench plays engines against an agent, replays recorded traces through them, and
// measures parts of kvagent.
package main

import (
	"os"

	"github.com/kvagent/kvagent/lab"
)

func main() { os.Exit(lab.Main(os.Args[1:], os.Stderr)) }
