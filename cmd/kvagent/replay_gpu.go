package main

import (
	"encoding/json"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// engineDevice is where an engine's memory is. With GPUs every second engine has virtual memory, as one whose PyTorch has
// expandable segments, and they share blocks.
func (s *replaySettings) engineDevice(number int) string {
	switch {
	case s.device != settings.DeviceCUDA:
		return mockengine.DeviceHost
	case number%2 == 1:
		return mockengine.DeviceVirtual
	}
	return mockengine.DeviceCUDA
}

// openImports is how many allocations, pieces and events of engines the agent's movers have open, as they said last: at
// most some seconds ago.
func openImports(st *agent.Status) (n int) {
	for i := range st.Movers {
		var info cudaipc.CUDAInfo
		if json.Unmarshal(st.Movers[i].Info, &info) == nil {
			n += int(info.Imports)
		}
	}
	return n
}
