#pragma once

#include <string>

#include "bagualu/cli/plan_job.h"

namespace bagualu {

/// The page of `bagualu plan --report` for a job (cli/plan_page.h draws it).
std::string job_page(const JobPlanRequest& request, const JobPlanReport& report);

}  // namespace bagualu
